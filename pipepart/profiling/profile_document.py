"""Profile: a layer graph with the measured costs of each layer."""

from __future__ import annotations

import hashlib
from typing import Self

from pydantic import Field, model_validator

from ..capture import LayerGraph, LayerInfo, TensorSpec
from ..document import ByteCount, Document, Seconds, Value
from .profile_checks import profile_faults


class Timing(Value):
    """Seconds of one thing, measured several times.

    Attributes:
        seconds: the median.
        spread: half the distance between the quartiles.
    """

    seconds: Seconds = 0.0
    spread: Seconds = 0.0


class LayerCost(Value):
    """What a layer costs at one micro-batch size.

    Attributes:
        forward: its forward.
        backward_input: the part of its backward that schedules with two parts run first, for the gradient of its
            input; next to 0 where none is needed.
        backward_weight: the rest of its backward, with the gradients of the parameters that can wait.
        saved_bytes: what autograd keeps from forward to backward, parameters and buffers left out, storage that
            several tensors share counted once.
        input_bytes, output_bytes: what it gets and returns.
        peak_bytes: what its forward or backward needs for a while, beyond what it was given and what it saves.
        split_seconds: what the two parts take together beyond the whole backward, each run by itself; negative where
            they are quicker, None where they were not timed apart.
        waiting_bytes: what is kept between the two parts of a split backward: its weights' inputs, and the gradients of
            the outputs made with them; 0 where no weight can wait.
    """

    forward: Timing = Timing()
    backward_input: Timing = Timing()
    backward_weight: Timing = Timing()
    split_seconds: float | None = Field(default=None, allow_inf_nan=False)
    saved_bytes: ByteCount = 0
    input_bytes: ByteCount = 0
    output_bytes: ByteCount = 0
    peak_bytes: ByteCount = 0
    waiting_bytes: ByteCount = 0

    @property
    def backward_seconds(self) -> float:
        """The whole backward."""
        return self.backward_input.seconds + self.backward_weight.seconds

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.seconds + self.backward_seconds


class SavedTensor(Value):
    """One piece of memory that is kept from forward to backward, and the layers (by index) that keep it.

    Attributes:
        bytes: its size.
        layers: indices, increasing; a stage pays once, however many of its layers keep it.
        input_of: indices of the layers that get it as their input.
    """

    bytes: ByteCount
    layers: tuple[int, ...]
    input_of: tuple[int, ...] = ()


class Costs(Value):
    """What all layers cost at one micro-batch size.

    Attributes:
        micro_batches: number of micro-batches of a mini-batch.
        samples: samples in the largest of them, the size that was measured.
        layers: one cost a layer, in execution order.
        loss: the cost of the loss function.
        saved: the memory kept for backward, piece by piece.
        repeats: how often each layer was timed.
    """

    micro_batches: int = Field(ge=1)
    samples: int = Field(ge=0)
    layers: tuple[LayerCost, ...]
    loss: LayerCost = LayerCost()
    saved: tuple[SavedTensor, ...] = ()
    repeats: int = Field(default=0, ge=0)


class Profile(Document):
    """The layers of a model and their costs at one micro-batch size or several.

    Attributes:
        model: class of the model.
        batch: samples in the mini-batch.
        inputs, outputs: of the model, for one micro-batch of ``costs[0].samples``.
        layers: in execution order.
        costs: one entry for each number of micro-batches that was measured.
        optimizer: whose state ``optimizer_bytes`` counts.
        device: where it was measured.
        threads: intra-operation threads it was measured with; None for an accelerator.
        torch_version: the torch that ran.
    """

    model: str
    batch: int = Field(ge=0)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[LayerInfo, ...] = Field(min_length=1)
    costs: tuple[Costs, ...] = Field(min_length=1)
    optimizer: str
    device: str
    threads: int | None
    torch_version: str

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        faults = [] if self.optimizer in STATE_PER_GRADIENT else [_unknown_optimizer(self.optimizer)]
        faults += profile_faults(self)
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    @property
    def graph(self) -> LayerGraph:
        """The layers as a graph."""
        return LayerGraph.chain(list(self.layers), self.inputs)

    @property
    def fingerprint(self) -> str:
        """A short text that changes when the layers, their parameters or their shapes do."""
        text = "\n".join(layer.model_dump_json() for layer in self.layers)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at(self, micro_batches: int) -> Costs:
        """The costs for that number of micro-batches.

        Raises:
            ValueError: it was not measured.
        """
        for costs in self.costs:
            if costs.micro_batches == micro_batches:
                return costs
        measured = [costs.micro_batches for costs in self.costs]
        raise ValueError(
            f"the profile was measured for {measured} micro-batches, not for {micro_batches}: "
            f"profile again with micro_batches={micro_batches}"
        )

    def optimizer_bytes(self, layer: LayerInfo) -> int:
        """The optimizer's state for one layer."""
        return STATE_PER_GRADIENT[self.optimizer] * layer.gradient_bytes


# State tensors as large as the parameter that the usual optimizers keep for each trained one.
STATE_PER_GRADIENT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def check_optimizer(name: str) -> str:
    """The name, lower-cased.

    Raises:
        ValueError: an optimizer whose state is not known.
    """
    if name.lower() not in STATE_PER_GRADIENT:
        raise ValueError(_unknown_optimizer(name))
    return name.lower()


def _unknown_optimizer(name: str) -> str:
    known = ", ".join(map(repr, sorted(STATE_PER_GRADIENT)))
    return f"the state of optimizer {name!r} is not known: choose one of {known}"
