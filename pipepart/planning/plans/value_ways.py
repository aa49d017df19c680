"""Lists the live values that cross stage borders of a plan, with their users and the stages that hold them."""

from __future__ import annotations

from typing import NamedTuple

from .plan import Plan


class ValueWay(NamedTuple):
    """A live value that at least two stages hold.

    Attributes:
        maker: the layer that computes it; empty for an argument of the model.
        users: (layer, stage) of each later layer that uses it.
        bytes: of one micro-batch.
        stages: the stages that hold it, in order. A value skips the stages that are not listed.
    """

    maker: str
    users: tuple[tuple[str, int], ...]
    bytes: int
    stages: tuple[int, ...]

    def crosses(self, border: int) -> bool:
        """Return True if the value crosses the border between stages ``border`` and ``border + 1``."""
        return self.stages[0] <= border < self.stages[-1]

    def users_behind(self, border: int) -> list[str]:
        """Return the layers that use the value in stages after ``border``."""
        return [name for name, stage in self.users if stage > border]


def value_ways(plan: Plan) -> list[ValueWay]:
    """Return the live values that cross stage borders, in the order of the profile.

    The list is empty for a plan without a profile, and for a chain, in which each stage sends the output of its last
    layer.
    """
    if plan.profile is None:
        return []
    names = [info.name for info in plan.profile.layers]
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    ways = []
    for value in plan.profile.at(plan.micro_batches).values:
        stages = tuple(sorted({stage_of[layer] for layer in value.layers}))
        if len(stages) > 1:
            first, *users = ((names[layer], stage_of[layer]) for layer in value.layers)
            ways.append(ValueWay("" if value.is_argument else first[0], tuple(users), value.bytes, stages))
    return ways
