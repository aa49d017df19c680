"""StagePlan: one stage of a plan, its device and its predicted cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..document import ByteCount, Seconds, Value

# The micro-batches for which a stage repeats its forward right before the backward instead of keeping the stash.
Recompute = Literal["never", "except-last", "always"]

TOLERANCE = 1e-9  # predicted seconds that differ by less, relative to them, are equal


class StagePlan(Value):
    """One stage: consecutive layers of the model on one device. Seconds and bytes are for one micro-batch.

    Attributes:
        layers: names of its layers, in execution order.
        device: name of its device in the plan's cluster.
        forward_seconds, backward_input_seconds, backward_weight_seconds: predicted compute.
        split_seconds: extra seconds if the backward runs as its two parts; negative if that is faster, None if it was
            not measured.
        transfer_seconds: to move its inputs, its outputs and their gradients.
        output_bytes: sent to the next stage, or returned.
        static_bytes: parameters, gradients, optimizer state and buffers, whatever the number of micro-batches. The
            parameters count once a version under an asynchronous schedule.
        gradient_bytes, optimizer_bytes, buffer_bytes: parts of ``static_bytes``.
        stash_bytes: kept for the backward of each micro-batch in flight.
        recompute: the micro-batches for which only the input is kept and the forward is repeated: none, all but the
            last of a step, or all.
        recompute_seconds: of the repeated forward; 0 if it is never repeated.
        boundary_bytes: the input, kept instead of the stash until the forward is repeated.
        deferred_bytes: kept between the two parts of a split backward for the weight gradients; an upper bound if
            layers share memory.
        transient_bytes: workspace of the layer that needs most, and the incoming gradient of the output.
        in_flight: the most micro-batches whose forward has run and whose backward has not.
        full_stashes, input_only, deferred_weight_grads: at the memory peak, the micro-batches kept as full stash, as
            input only, and awaiting their weight gradient.
    """

    layers: tuple[str, ...] = Field(min_length=1)
    device: str
    forward_seconds: Seconds = 0.0
    backward_input_seconds: Seconds = 0.0
    backward_weight_seconds: Seconds = 0.0
    split_seconds: float | None = Field(default=None, allow_inf_nan=False)
    transfer_seconds: Seconds = 0.0
    output_bytes: ByteCount = 0
    static_bytes: ByteCount = 0
    gradient_bytes: ByteCount = 0
    optimizer_bytes: ByteCount = 0
    buffer_bytes: ByteCount = 0
    stash_bytes: ByteCount = 0
    recompute: Recompute = "never"
    recompute_seconds: Seconds = 0.0
    boundary_bytes: ByteCount = 0
    deferred_bytes: ByteCount = 0
    transient_bytes: ByteCount = 0
    in_flight: int = Field(default=0, ge=0)
    full_stashes: int = Field(default=0, ge=0)
    input_only: int = Field(default=0, ge=0)
    deferred_weight_grads: int = Field(default=0, ge=0)

    @property
    def load_seconds(self) -> float:
        """Compute and communication for one micro-batch."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds + self.transfer_seconds

    @property
    def backward_seconds(self) -> float:
        """The whole backward."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def part_seconds(self) -> tuple[float, float]:
        """The two parts of the backward, each run by itself: I and W."""
        total = self.backward_seconds
        factor = max(0.0, 1 + (self.split_seconds or 0.0) / total) if total else 1.0
        return self.backward_input_seconds * factor, self.backward_weight_seconds * factor

    @property
    def parameter_bytes(self) -> int:
        """The parameters, in all versions."""
        return max(self.static_bytes - self.gradient_bytes - self.optimizer_bytes - self.buffer_bytes, 0)

    @property
    def kept_bytes(self) -> int:
        """Kept for backwards at the memory peak."""
        kept = self.full_stashes * self.stash_bytes + self.input_only * self.boundary_bytes
        return kept + self.deferred_weight_grads * self.deferred_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory peak of the stage."""
        return self.static_bytes + self.kept_bytes + self.transient_bytes
