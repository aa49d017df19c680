"""Profile: the layers of a model and their costs, as a value that can be saved as JSON."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from ..capture import LayerInfo, TensorSpec
from ..document import Document
from ..input_error import InputError
from ..pages import notebook_html
from ..units import counted, format_seconds
from .analytic.roofline import Roofline
from .costs import Costs, Overhead

if TYPE_CHECKING:
    from ..capture import LayerGraph


class Profile(Document):
    """The layers of a model and their costs at one micro-batch size or several.

    Attributes:
        model: class of the model.
        batch: samples in the mini-batch.
        inputs, outputs: specs of the model's inputs and outputs for one micro-batch of ``costs[0].samples``.
        layers: in execution order.
        edges: of a model with branches, the pairs of layers ``(a, b)`` such that b uses the output of a. Empty for a
            chain, in which each layer feeds the next one.
        costs: one entry for each number of micro-batches that was measured.
        writes_statistics: layers with a BatchNorm that updated its running statistics. The plan has one replica then,
            unless another number is asked for.
        optimizer: name of the optimizer whose state :meth:`optimizer_bytes` counts.
        device: the device that it was measured on, or is estimated for.
        threads: intra-operation threads that each layer had; None on an accelerator.
        torch_version: the version of torch that ran.
        notes: which modules of a recorded model were opened or left whole, and why; which layers were timed for others;
            whether times are estimates.
        roofline: if times are estimates, what they were estimated from; None if they were measured.
        overhead: what a step on this machine's CPU takes besides its layers. The profile of a plan has none left: the
            plan counts it in the seconds of its layers, devices and links.
    """

    model: str
    batch: int = Field(ge=0)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[LayerInfo, ...] = Field(min_length=1)
    edges: tuple[tuple[str, str], ...] = ()
    costs: tuple[Costs, ...] = Field(min_length=1)
    writes_statistics: tuple[str, ...] = ()
    optimizer: str
    device: str
    threads: int | None
    torch_version: str
    notes: tuple[str, ...] = ()
    roofline: Roofline | None = None
    overhead: Overhead = Overhead()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        faults = [] if self.optimizer in STATE_PER_GRADIENT else [_unknown_optimizer(self.optimizer)]
        faults += _faults(self.layers, self.costs, self.edges)
        if faults:
            raise InputError("\n  ".join(faults))
        return self

    @property
    def graph(self) -> LayerGraph:
        """The layers and the tensors between them as a graph."""
        from ..capture import LayerGraph  # networkx takes half a second to import

        layers, values = list(self.layers), self.costs[0].values
        if self.edges:
            return LayerGraph.branched(layers, self.edges, self.inputs)
        if values:
            made = [(value.layers, value.bytes, None) for value in values if not value.is_argument]
            return LayerGraph.recorded(layers, made, self.inputs)
        return LayerGraph.chain(layers, self.inputs)

    @property
    def fingerprint(self) -> str:
        """A short hash of the layers (names, classes, arguments, parameters, buffers and dtypes) and the edges.

        It does not depend on the sample, on the micro-batch size or on any time.
        """
        layers = [layer.model_dump_json(exclude={"outputs"}) for layer in self.layers]
        text = "\n".join([*layers, *(f"{one} -> {other}" for one, other in self.edges)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at(self, micro_batches: int) -> Costs:
        """Return the costs for a number of micro-batches.

        Raises:
            ValueError: this number was not measured.
        """
        for costs in self.costs:
            if costs.micro_batches == micro_batches:
                return costs
        measured = [costs.micro_batches for costs in self.costs]
        raise InputError(
            f"the profile was measured for {measured} micro-batches, not for {micro_batches}: "
            f"profile again with micro_batches={micro_batches}"
        )

    def optimizer_bytes(self, layer: LayerInfo) -> int:
        """Return the size of the optimizer's state for one layer."""
        return STATE_PER_GRADIENT[self.optimizer] * layer.gradient_bytes

    def __str__(self) -> str:
        """A summary in one line; ``model_dump_json`` has everything."""
        costs = self.costs[0]
        seconds = sum(cost.seconds for cost in costs.layers) + costs.loss.seconds
        return (
            f"{type(self).__name__} of {self.model}: {counted(len(self.layers), 'layer')}, {format_seconds(seconds)} a "
            f"micro-batch of {counted(costs.samples, 'sample')} on {self.device}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the layers with their times in a notebook."""
        return notebook_html(self)


# State tensors that an optimizer keeps for each trained parameter, each as large as the parameter.
STATE_PER_GRADIENT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def check_optimizer(name: str) -> str:
    """Return the name of an optimizer in lower case.

    Raises:
        ValueError: the state of this optimizer is not known.
    """
    if name.lower() not in STATE_PER_GRADIENT:
        raise InputError(_unknown_optimizer(name))
    return name.lower()


def _unknown_optimizer(name: str) -> str:
    known = ", ".join(map(repr, sorted(STATE_PER_GRADIENT)))
    return f"the state of optimizer {name!r} is not known: choose one of {known}"


def _faults(
    layers: Sequence[LayerInfo], costs: Sequence[Costs], edges: Sequence[tuple[str, str]]
) -> list[str]:
    """Return contradictions in a profile that was written or edited by hand, one text for each."""
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
    for number, value in enumerate(costs.values):
        if list(value.layers) != sorted({index for index in value.layers if 0 <= index < layers}):
            yield f"values.{number} names layers {list(value.layers)}: indices increase, from 0 to {layers - 1}"
    if costs.scale and len(costs.scale) != costs.micro_batches:
        yield f"scale has {len(costs.scale)} numbers for {costs.micro_batches} micro-batches"
    unlisted = [index for index, cost in enumerate(costs.layers) if cost.saved_bytes > kept[index]]
    if unlisted:
        first, others = unlisted[0], len(unlisted) - 1
        more = f" (and {counted(others, 'more layer')})" if others else ""
        yield (
            f"layers.{first} has saved_bytes {costs.layers[first].saved_bytes}, and the tensors in 'saved' that it "
            f"keeps have {kept[first]}{more}: list all that layers keep for the backward, "
            f'as in saved=[{{"bytes": {costs.layers[first].saved_bytes}, "layers": [{first}]}}]'
        )


def _repeated(values: Iterable[object]) -> list[object]:
    return [value for value, count in Counter(values).items() if count > 1]
