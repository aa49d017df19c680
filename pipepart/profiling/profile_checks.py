"""Finds contradictions in a profile that was written or edited by hand, one text for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..capture import LayerInfo
from .costs import Costs


def profile_faults(
    layers: Sequence[LayerInfo], costs: Sequence[Costs], edges: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Contradictions among the layers and between layers and costs; empty if there are none."""
    faults = [*_layer_faults(layers), *_edge_faults(layers, edges)]
    for index, entry in enumerate(costs):
        faults += [f"costs.{index}: {fault}" for fault in _cost_faults(entry, len(layers))]
    counts = [entry.micro_batches for entry in costs]
    return faults + [
        f"there are two entries of costs for {count} micro-batches" for count in _repeated(counts)
    ]


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
                f"layer {info.name!r} has {info.gradient_bytes} bytes of gradients, which is more than its "
                f"{info.parameter_bytes} bytes of parameters"
            )


def _edge_faults(layers: Sequence[LayerInfo], edges: Sequence[tuple[str, str]]) -> Iterator[str]:
    place = {info.name: index for index, info in enumerate(layers)}
    for edge in _repeated(edges):
        yield f"edge {edge} is given twice"
    for one, other in edges:
        unknown = [name for name in (one, other) if name not in place]
        if unknown:
            yield f"edge {(one, other)} names {unknown[0]!r}, which is no layer"
        elif place[one] >= place[other]:
            yield f"edge {(one, other)} goes against the execution order: {one!r} does not run before {other!r}"


def _cost_faults(costs: Costs, layers: int) -> Iterator[str]:
    if len(costs.layers) != layers:
        yield f"{len(costs.layers)} layers have costs, and the profile has {layers} layers"
    kept = [0] * max(layers, len(costs.layers))
    for number, tensor in enumerate(costs.saved):
        unknown = [index for index in (*tensor.layers, *tensor.input_of) if not 0 <= index < layers]
        if unknown:
            yield f"saved.{number} names layers {unknown}: indices run from 0 to {layers - 1}"
            continue
        for index in tensor.layers:
            kept[index] += tensor.bytes
    unlisted = [index for index, cost in enumerate(costs.layers) if cost.saved_bytes > kept[index]]
    if unlisted:
        first = unlisted[0]
        yield (
            f"layers.{first} has saved_bytes {costs.layers[first].saved_bytes}, and the tensors in 'saved' that it "
            f"keeps have {kept[first]}{_and_more(len(unlisted) - 1)}: list all that layers keep for the backward, "
            f'as in saved=[{{"bytes": {costs.layers[first].saved_bytes}, "layers": [{first}]}}]'
        )


def _and_more(count: int) -> str:
    return f" (and {count} more layers)" if count else ""


def _repeated(values: Iterable[object]) -> list[object]:
    return [value for value, count in Counter(values).items() if count > 1]
