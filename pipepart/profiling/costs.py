"""Costs of the layers of a model for one micro-batch: seconds and bytes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..document import ByteCount, Seconds, Value

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"]


class Timing(Value):
    """A duration, from several measurements.

    Attributes:
        seconds: mean of the measurements, where none counts as more than twice their median.
        spread: half their interquartile range, in seconds.
    """

    seconds: Seconds = 0.0
    spread: Seconds = 0.0

    def scaled(self, factor: float) -> Timing:
        """Return the duration multiplied by a factor."""
        return Timing(seconds=self.seconds * factor, spread=self.spread * factor)


class Overhead(Value):
    """Runtime overhead on the CPU, and the conditions under which slowdowns were measured. Zero by default.

    Attributes:
        action_seconds: seconds that the runtime adds to each action of a stage.
        message_seconds: latency of a message: from the end of an action to the start of the next on another device.
        step_seconds: seconds that the runtime takes before the first and after the last action of a step.
        devices: number of devices that computed while ``LayerCost.slowdown`` was measured; 1 if it was not measured.
        cores: number of cores of the machine; None if unknown.
    """

    action_seconds: Seconds = 0.0
    message_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    devices: int = Field(default=1, ge=1)
    cores: int | None = Field(default=None, ge=1)

    def slowdown(self, measured: float, devices: int, threads: int) -> float:
        """Return the factor by which a layer is slower while several devices of the same machine compute.

        The factor is linear in the number of devices, from 1 for one device to ``measured`` for ``self.devices``. If
        there are more threads than cores, it also grows by their ratio.

        Args:
            measured: ``LayerCost.slowdown``: the factor while ``self.devices`` devices compute.
            devices: number of devices that compute at once.
            threads: number of threads of each device.
        """
        fitting = devices if self.cores is None else min(devices, max(1, self.cores // threads))
        beside = 1 + (measured - 1) * (fitting - 1) / (self.devices - 1) if self.devices > 1 else 1.0
        return max(beside, 1e-3) * (1.0 if self.cores is None else max(1.0, devices * threads / self.cores))


class Collective(Value):
    """Equal collectives among the processes that share a layer, in the forward or the backward of one micro-batch.

    Attributes:
        kind: what they do.
        bytes: size of the larger one of input and output, in each process.
        count: number of them.
    """

    kind: CollectiveKind
    bytes: ByteCount
    count: int = Field(default=1, ge=1)


class LayerCost(Value):
    """Seconds and bytes of a layer for one micro-batch.

    Attributes:
        forward: time of the forward.
        backward_input: time of the backward for the input gradients (action I); almost 0 if no input needs one.
        backward_weight: time of the rest of the backward: the weight gradients that can be deferred (action W).
        split_seconds: time of I and W, run separately, minus the time of the whole backward; None if not measured.
        saved_bytes: size of the tensors that autograd saves for the backward, without parameters and buffers. Tensors
            that share memory count once. ``Costs.saved`` lists this memory tensor by tensor, and planning reads that
            list.
        input_bytes, output_bytes: size of the inputs and of the outputs.
        output_gradient_bytes: size of the output gradients; None for the size of the outputs.
        workspace_bytes: temporary memory of the whole backward, besides saved tensors and output gradients.
        forward_workspace_bytes: temporary memory of the forward, besides saved tensors. None for ``workspace_bytes``.
        input_workspace_bytes: temporary memory of action I, as ``workspace_bytes``. None for ``workspace_bytes``.
        weight_workspace_bytes: temporary memory of action W, besides ``deferred_bytes``. None for ``workspace_bytes``.
        deferred_bytes: memory held from I to W: inputs of the operations on weights, and their output gradients.
        slowdown: factor by which the layer is slower while the other devices of a CPU compute. The seconds do not
            include it.
        forward_collectives, backward_collectives: collectives of a layer that several processes share. The seconds do
            not include them.
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
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward."""
        return self.backward_input.seconds + self.backward_weight.seconds

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.seconds + self.backward_seconds

    def scaled(self, forward: float, backward: float) -> LayerCost:
        """Return the cost with the seconds of the forward and of the backward multiplied by these factors."""
        return self.model_copy(
            update={
                "forward": self.forward.scaled(forward),
                "backward_input": self.backward_input.scaled(backward),
                "backward_weight": self.backward_weight.scaled(backward),
                "split_seconds": None if self.split_seconds is None else self.split_seconds * backward,
            }
        )


class SavedTensor(Value):
    """A tensor that is held in memory from the forward to the backward of a micro-batch.

    Attributes:
        bytes: size of the tensor.
        layers: indices of the layers whose backward needs the tensor, increasing. A stage with several of these layers
            holds it once.
        input_of: indices of the layers that take the tensor as an input. A stage that starts with such a layer also
            holds it.
        passed_by: the layers in ``input_of`` that do not use the tensor. A value may skip a stage of only such layers.
    """

    bytes: ByteCount
    layers: tuple[int, ...]
    input_of: tuple[int, ...] = ()
    passed_by: tuple[int, ...] = ()


class LiveValue(Value):
    """A value that one layer produces and later layers use.

    Attributes:
        bytes: size of the value.
        layers: indices of the layers that produce or use the value, increasing. Those of a model argument begin with 0.
        is_argument: whether the value is an argument of the model, which no layer produces.
    """

    bytes: ByteCount
    is_argument: bool = False
    layers: tuple[int, ...] = Field(min_length=2)


class Costs(Value):
    """Costs of all layers for one number of micro-batches.

    Attributes:
        micro_batches: number of micro-batches in a mini-batch; the argument of the ``split`` function if there is one.
        samples: number of samples in the largest micro-batch. All bytes are for this micro-batch.
        layers: one entry per layer, in execution order. Seconds are means over the micro-batches.
        loss: cost of the loss function alone: seconds, saved tensors, workspace, and the target (``input_bytes``).
            The bytes of the last layer already include those of the loss.
        saved: tensors held from forward to backward.
        values: values that pass between layers, one entry each. A value is sent only to stages that use it. Empty for
            a chain, in which each layer feeds the next layer.
        repeats: number of times that each layer was timed.
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
