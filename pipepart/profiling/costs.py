"""Costs of the layers of a model for one micro-batch: seconds and bytes."""

from __future__ import annotations

from pydantic import Field

from ..document import ByteCount, Seconds, Value


class Timing(Value):
    """A duration that was measured several times.

    Attributes:
        seconds: the mean without the slowest tenth.
        spread: half the interquartile range.
    """

    seconds: Seconds = 0.0
    spread: Seconds = 0.0


class Overhead(Value):
    """What a step on the CPU takes besides its layers, and what they were measured beside; nothing by default.

    Attributes:
        action_seconds: what the runtime adds to each action of a stage.
        message_seconds: latency of a message, from the end of an action to the start of one on another device.
        devices: how many computed at once when ``LayerCost.slowdown`` was measured; 1 if it was not.
        cores: of the machine; None if they are not known.
    """

    action_seconds: Seconds = 0.0
    message_seconds: Seconds = 0.0
    devices: int = Field(default=1, ge=1)
    cores: int | None = Field(default=None, ge=1)

    def slowdown(self, measured: float, devices: int, threads: int) -> float:
        """Return how many times as long a layer takes beside other devices of the same machine.

        It grows along a straight line from 1 for one device to what was measured. Threads beyond the number of cores
        take turns.

        Args:
            measured: ``LayerCost.slowdown``, while ``self.devices`` compute.
            devices: that compute at once.
            threads: of each.
        """
        fitting = devices if self.cores is None else min(devices, max(1, self.cores // threads))
        beside = 1 + (measured - 1) * (fitting - 1) / (self.devices - 1) if self.devices > 1 else 1.0
        return max(beside, 1e-3) * (1.0 if self.cores is None else max(1.0, devices * threads / self.cores))


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
        slowdown: how many times as long it takes while the other devices of a CPU compute, too. The seconds in the
            profile of a plan include it.
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
    slowdown: float = Field(default=1.0, gt=0, allow_inf_nan=False)

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
        samples: samples in the largest of them, whose bytes these are.
        layers: one cost a layer, in execution order. Seconds are means over the micro-batches.
        loss: the seconds of the loss function, what it alone saves, its workspace, and its target (``input_bytes``).
            The bytes of the last layer already include those of the loss.
        saved: the memory kept for the backward.
        values: what goes between layers, each value once; it is sent to stages that use it only. Empty for a chain, in
            which each layer feeds the next one.
        repeats: how often each layer was timed.
        scale: seconds of each micro-batch relative to their mean; empty if all have the same size.
    """

    micro_batches: int = Field(ge=1)
    samples: int = Field(ge=0)
    layers: tuple[LayerCost, ...]
    loss: LayerCost = LayerCost()
    saved: tuple[SavedTensor, ...] = ()
    values: tuple[LiveValue, ...] = ()
    repeats: int = Field(default=0, ge=0)
    scale: tuple[Seconds, ...] = ()
