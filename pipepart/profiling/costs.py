"""Costs of the layers of a model for one micro-batch: seconds and bytes."""

from __future__ import annotations

from pydantic import Field

from ..document import ByteCount, Seconds, Value


class Timing(Value):
    """A duration that was measured several times.

    Attributes:
        seconds: the median.
        spread: half the interquartile range.
    """

    seconds: Seconds = 0.0
    spread: Seconds = 0.0


class LayerCost(Value):
    """What a layer costs for one micro-batch.

    Attributes:
        forward: its forward.
        backward_input: the backward for the gradients of its inputs (action I); almost 0 if no input needs one.
        backward_weight: the rest of its backward: the weight gradients that can be deferred (action W).
        split_seconds: time of I and W, run separately, minus the time of the whole backward; None if not measured.
        saved_bytes: what autograd saves for the backward, without parameters and buffers. Tensors that share memory
            count once. ``Costs.saved`` lists this memory tensor by tensor, and planning reads that list.
        input_bytes, output_bytes: size of its inputs and of its outputs.
        output_gradient_bytes: size of the gradients of its outputs; None: as its outputs.
        workspace_bytes: memory that its backward needs temporarily, besides saved tensors and the gradients of its
            outputs.
        forward_workspace_bytes: memory that its forward needs temporarily, besides saved tensors.
        input_workspace_bytes: as ``workspace_bytes``, of the backward for the gradients of its inputs (action I).
        weight_workspace_bytes: memory that action W needs temporarily, besides ``deferred_bytes``. None in these three
            counts as ``workspace_bytes``.
        deferred_bytes: memory kept from I to W: inputs of its weights' operations, and the gradients of their outputs.
    """

    forward: Timing = Timing()
    backward_input: Timing = Timing()
    backward_weight: Timing = Timing()
    split_seconds: float | None = Field(default=None, allow_inf_nan=False)
    saved_bytes: ByteCount = 0
    input_bytes: ByteCount = 0
    output_bytes: ByteCount = 0
    output_gradient_bytes: ByteCount | None = None
    workspace_bytes: ByteCount = 0
    forward_workspace_bytes: ByteCount | None = None
    input_workspace_bytes: ByteCount | None = None
    weight_workspace_bytes: ByteCount | None = None
    deferred_bytes: ByteCount = 0

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward."""
        return self.backward_input.seconds + self.backward_weight.seconds

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.seconds + self.backward_seconds


class SavedTensor(Value):
    """Memory that is kept from the forward to the backward of a micro-batch.

    Attributes:
        bytes: its size.
        layers: indices of the layers whose backward needs it, increasing. A stage that holds several of them keeps
            it once.
        input_of: indices of the layers that it is an input of. A stage that starts with one of them keeps it, too.
        passed_by: those of ``input_of`` that do not use it. Live values may go past a stage of such layers only.
    """

    bytes: ByteCount
    layers: tuple[int, ...]
    input_of: tuple[int, ...] = ()
    passed_by: tuple[int, ...] = ()


class LiveValue(Value):
    """A value that one layer makes and later layers use.

    Attributes:
        bytes: its size.
        layers: indices of the layers that make or use it, increasing. An argument of the model begins at layer 0.
        is_argument: whether no layer makes it.
    """

    bytes: ByteCount
    is_argument: bool = False
    layers: tuple[int, ...] = Field(min_length=2)


class Costs(Value):
    """What all layers cost for one micro-batch of one size.

    Attributes:
        micro_batches: number of micro-batches of a mini-batch; with a ``split`` function, the number it is called with.
        samples: samples in the largest of them, which is the one that is measured.
        layers: one cost a layer, in execution order.
        loss: the seconds of the loss function, what it alone saves, its workspace, and its target (``input_bytes``).
            All its memory also counts in the last layer.
        saved: the memory kept for the backward.
        values: what goes between layers, each value once; it is sent to stages that use it only. Empty for a chain, in
            which each layer feeds the next one.
        repeats: how often each layer was timed.
    """

    micro_batches: int = Field(ge=1)
    samples: int = Field(ge=0)
    layers: tuple[LayerCost, ...]
    loss: LayerCost = LayerCost()
    saved: tuple[SavedTensor, ...] = ()
    values: tuple[LiveValue, ...] = ()
    repeats: int = Field(default=0, ge=0)
