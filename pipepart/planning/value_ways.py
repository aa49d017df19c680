"""Lists the live values of a plan that go past stages, and the ways that they take."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from .plan_document import Plan
from .straight import StageLinks


class ValueWay(NamedTuple):
    """The way of one live value.

    Attributes:
        maker: the layer that makes it; empty for an argument of the model.
        bytes: of one micro-batch.
        stages: that have it, in order. Two in a row that are no neighbours have stages between that do not.
    """

    maker: str
    bytes: int
    stages: tuple[int, ...]


def value_ways(plan: Plan) -> list[ValueWay]:
    """Return the values that go past at least one stage of a plan; none for a plan without a profile."""
    if plan.profile is None:
        return []
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    links = StageLinks(plan.cluster, [stage.device for stage in plan.stages])
    found = []
    for value in plan.profile.at(plan.micro_batches).skips:
        hops = links.hops(sorted({stage_of[layer] for layer in value.layers}))
        stages = tuple(dict.fromkeys(stage for hop in hops for stage in hop))
        if any(other > one + 1 for one, other in pairwise(stages)):
            maker = "" if value.is_argument else plan.profile.layers[value.layers[0]].name
            found.append(ValueWay(maker, value.bytes, stages))
    return found
