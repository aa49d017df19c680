"""Lists the live values that cross the borders of a plan's stages, and the ways that they take."""

from __future__ import annotations

from typing import NamedTuple

from ..costs.stage_links import StageLinks
from .plan_record import PlanRecord


class ValueWay(NamedTuple):
    """A live value that at least two stages have.

    Attributes:
        maker: the layer that makes it; empty for an argument of the model.
        users: the layers behind it that use it, each with its stage.
        bytes: of one micro-batch.
        stages: that have it, in order. Stages between two of them that are no neighbours do not see it.
    """

    maker: str
    users: tuple[tuple[str, int], ...]
    bytes: int
    stages: tuple[int, ...]

    def crosses(self, border: int) -> bool:
        """Return True if the value is made before the border behind stage ``border`` and used after it."""
        return self.stages[0] <= border < self.stages[-1]

    def users_behind(self, border: int) -> list[str]:
        """Return the layers behind the border that use it."""
        return [name for name, stage in self.users if stage > border]


def value_ways(plan: PlanRecord) -> list[ValueWay]:
    """Return the live values that cross borders, as the profile lists them.

    None for a plan without a profile, and for a chain, in which each stage sends the output of its last layer.
    """
    if plan.profile is None:
        return []
    names = [info.name for info in plan.profile.layers]
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    links = StageLinks(plan.cluster, [stage.device for stage in plan.stages])
    ways = []
    for value in plan.profile.at(plan.micro_batches).values:
        hops = links.hops(sorted({stage_of[layer] for layer in value.layers}))
        if hops:
            first, *users = ((names[layer], stage_of[layer]) for layer in value.layers)
            stages = tuple(dict.fromkeys(stage for hop in hops for stage in hop))
            ways.append(ValueWay("" if value.is_argument else first[0], tuple(users), value.bytes, stages))
    return ways
