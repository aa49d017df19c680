"""Profiles of made-up layers with branches."""

from __future__ import annotations

from pipepart import Profile
from pipepart.profiling import SavedTensor
from tests.planning.problems import Layer, profile_of


def branched(layers: list[Layer], edges: list[tuple[int, int]], micro_batches: int = 1) -> Profile:
    """A profile whose layer i feeds layer j for each edge (i, j); nothing is saved but what ``Layer`` says."""
    chain = profile_of(layers, (micro_batches,))
    made = [
        SavedTensor(bytes=layer.output, layers=(), input_of=tuple(j for one, j in edges if one == index))
        for index, layer in enumerate(layers)
    ]
    own = [SavedTensor(bytes=layer.saved, layers=(index,)) for index, layer in enumerate(layers)]
    costs = tuple(costs.model_copy(update={"saved": (*made, *own)}) for costs in chain.costs)
    return Profile(
        **{
            **dict(chain),
            "costs": costs,
            "edges": tuple((f"layer{one}", f"layer{other}") for one, other in edges),
        }
    )
