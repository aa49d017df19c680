"""What is wrong with a profile that was edited: parts that do not belong together, one text a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..capture import LayerInfo
    from .profile_document import Costs, Profile


def profile_faults(profile: Profile) -> list[str]:
    """Layers that are there twice or share with unknown ones, and costs that are not those of the layers."""
    faults = list(_layer_faults(profile.layers))
    for index, costs in enumerate(profile.costs):
        faults += [f"costs.{index}: {fault}" for fault in _cost_faults(costs, len(profile.layers))]
    counts = [costs.micro_batches for costs in profile.costs]
    return faults + [f"costs for {count} micro-batches are there twice" for count in _repeated(counts)]


def _layer_faults(layers: Sequence[LayerInfo]) -> Iterator[str]:
    for name in _repeated(info.name for info in layers):
        yield f"two layers are called {name!r}"
    before: set[str] = set()
    for info in layers:
        for other in info.shares_with:
            if other not in before:
                yield f"layer {info.name!r} shares with {other!r}, which is no layer before it"
        before.add(info.name)
        if info.gradient_bytes > info.parameter_bytes:
            yield (
                f"layer {info.name!r} trains {info.gradient_bytes} bytes of parameters and has "
                f"{info.parameter_bytes}"
            )


def _cost_faults(costs: Costs, layers: int) -> Iterator[str]:
    if len(costs.layers) != layers:
        yield f"{len(costs.layers)} costs of layers are given, there are {layers} layers"
    for number, piece in enumerate(costs.saved):
        unknown = [index for index in (*piece.layers, *piece.input_of) if not 0 <= index < layers]
        if unknown:
            yield f"saved.{number} is kept by layers {unknown}, which are none of the {layers}"


def _repeated(values: Iterable[object]) -> list[object]:
    return [value for value, count in Counter(values).items() if count > 1]
