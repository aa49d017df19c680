"""Profile: the layers of a model and their costs, as a document that can be saved as JSON."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from ..capture import LayerInfo, TensorSpec
from ..document import Document
from ..input_error import InputError
from ..pages import notebook_html
from ..units import counted, format_seconds
from .costs import Costs, Overhead
from .roofline import Roofline

if TYPE_CHECKING:
    from ..capture import LayerGraph


class Profile(Document):
    """The layers of a model and their costs, for one or several micro-batch sizes.

    Attributes:
        kind: of the file.
        model: class name of the model.
        batch: number of samples in the mini-batch.
        inputs, outputs: specs of the model's inputs and outputs for one micro-batch of ``costs[0].samples``.
        layers: the layers in execution order.
        costs: one entry for each measured number of micro-batches.
        writes_statistics: names of layers with a BatchNorm that updates its running statistics. If there are any,
            plans have one replica by default.
        optimizer: name of the optimizer whose state :meth:`optimizer_bytes` counts.
        device: the device that the layers were measured on or estimated for.
        threads: number of intra-operation threads while the layers were timed; None on an accelerator.
        torch_version: the installed version of torch.
        notes: which modules of a recorded model were opened or left whole, and why; whether times are estimates.
        roofline: the roofline that times were estimated from; None if they were measured.
        tensor: number of processes that share the layers: all costs are those of one process. 1 for whole layers.
        overhead: runtime overhead on this machine's CPU. A plan counts it in the seconds of its stages, devices and
            links.
    """

    kind: Literal["profile"] = "profile"
    model: str
    batch: int = Field(ge=0)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[LayerInfo, ...] = Field(min_length=1)
    costs: tuple[Costs, ...] = Field(min_length=1)
    writes_statistics: tuple[str, ...] = ()
    optimizer: str
    device: str
    threads: int | None
    torch_version: str
    notes: tuple[str, ...] = ()
    roofline: Roofline | None = None
    tensor: int = Field(default=1, ge=1)
    overhead: Overhead = Overhead()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        faults = [] if self.optimizer in STATE_PER_GRADIENT else [_unknown_optimizer(self.optimizer)]
        faults += _faults(self.layers, self.costs)
        if faults:
            raise InputError("\n  ".join(faults))
        return self

    @property
    def graph(self) -> LayerGraph:
        """Graph of the layers and the tensors between them."""
        from ..capture import LayerGraph  # networkx takes half a second to import

        layers, values = list(self.layers), self.costs[0].values
        edges = [(value.layers, value.bytes, ()) for value in values if not value.is_argument]
        if not values:  # an nn.Sequential
            edges = [((i, i + 1), layer.output_bytes, layer.outputs) for i, layer in enumerate(layers[:-1])]
        return LayerGraph.of(layers, edges, self.inputs)

    @property
    def fingerprint(self) -> str:
        """A short hash of the layers: names, classes, arguments, parameters, buffers and dtypes.

        Does not depend on the sample, the micro-batch size or measured times.
        """
        text = "\n".join(layer.model_dump_json(exclude={"outputs"}) for layer in self.layers)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at(self, micro_batches: int) -> Costs:
        """Return the costs for a number of micro-batches.

        Raises:
            ValueError: the profile has no costs for this number.
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
        """Return a summary in one line; ``model_dump_json`` returns everything."""
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


# Number of state tensors of an optimizer for each trained parameter, each as large as the parameter.
STATE_PER_GRADIENT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def check_optimizer(name: str) -> str:
    """Return the name of an optimizer in lower case.

    Raises:
        ValueError: the size of this optimizer's state is unknown.
    """
    if name.lower() not in STATE_PER_GRADIENT:
        raise InputError(_unknown_optimizer(name))
    return name.lower()


def _unknown_optimizer(name: str) -> str:
    known = ", ".join(map(repr, sorted(STATE_PER_GRADIENT)))
    return f"the state of optimizer {name!r} is not known: choose one of {known}"


def _faults(layers: Sequence[LayerInfo], costs: Sequence[Costs]) -> list[str]:
    """Return the contradictions between layers and costs, as in a profile edited by hand, one message each."""
    faults = [*_layer_faults(layers)]
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
        for partner in info.shares_with:
            if partner not in before:
                yield f"layer {info.name!r} shares with {partner!r}, which is no layer before it"
        before.add(info.name)
        if info.gradient_bytes > info.parameter_bytes:
            yield (
                f"layer {info.name!r} has {info.gradient_bytes} bytes of gradients, which is more than its "
                f"{info.parameter_bytes} bytes of parameters"
            )


def _cost_faults(costs: Costs, layers: int) -> Iterator[str]:
    if len(costs.layers) != layers:
        yield f"{len(costs.layers)} layers have costs, and the profile has {layers} layers"
    listed = [0] * max(layers, len(costs.layers))
    for number, tensor in enumerate(costs.saved):
        unknown = [index for index in (*tensor.layers, *tensor.input_of) if not 0 <= index < layers]
        if unknown:
            yield f"saved.{number} names layers {unknown}: indices run from 0 to {layers - 1}"
            continue
        for index in tensor.layers:
            listed[index] += tensor.bytes
    for number, value in enumerate(costs.values):
        if list(value.layers) != sorted({index for index in value.layers if 0 <= index < layers}):
            yield f"values.{number} names layers {list(value.layers)}: indices increase, from 0 to {layers - 1}"
    if costs.scale and len(costs.scale) != costs.micro_batches:
        yield f"scale has {len(costs.scale)} numbers for {costs.micro_batches} micro-batches"
    unlisted = [index for index, cost in enumerate(costs.layers) if cost.saved_bytes > listed[index]]
    if unlisted:
        first, further = unlisted[0], len(unlisted) - 1
        more = f" (and {counted(further, 'more layer')})" if further else ""
        yield (
            f"layers.{first} has saved_bytes {costs.layers[first].saved_bytes}, and the tensors in 'saved' that it "
            f"keeps have {listed[first]}{more}: list all that layers keep for the backward, "
            f'as in saved=[{{"bytes": {costs.layers[first].saved_bytes}, "layers": [{first}]}}]'
        )


def _repeated(values: Iterable[object]) -> list[object]:
    return [value for value, count in Counter(values).items() if count > 1]
