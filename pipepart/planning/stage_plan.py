"""StagePlan: one stage of a plan, where it runs and what it costs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..document import ByteCount, Seconds, Value

# Which micro-batches a stage runs its forward again for, right before their backward, instead of keeping the stash.
Recompute = Literal["never", "except-last", "always"]


class StagePlan(Value):
    """One stage: a connected piece of the model on one device.

    Attributes:
        layers: names of its layers, in execution order.
        device: name of its device in the plan's cluster.
        forward_seconds, backward_input_seconds, backward_weight_seconds: predicted for one micro-batch.
        output_bytes: what it sends to the next stage, or returns.
        split_seconds: what the two parts of its backward take together beyond the whole; negative where they are
            quicker, None where that was not measured.
        transfer_seconds: to move its inputs and outputs and their gradients for one micro-batch.
        static_bytes: parameters, in all versions of an asynchronous schedule, gradients and optimizer state.
        gradient_bytes, optimizer_bytes: the latter two of these.
        stash_bytes: kept for backward for each micro-batch in flight.
        recompute: of which micro-batches only the input is kept, and the rest made again right before the backward:
            of none, of all but the last of a step, or of all.
        recompute_seconds: predicted to make it again for one micro-batch; 0 where that is never done.
        boundary_bytes: the input, kept in place of the stash where it is made again.
        deferred_bytes: kept in place of the stash between the two parts of a backward, where the schedule has two, for
            the gradients of weights; an upper bound where layers share memory.
        transient_bytes: needed for a while by one layer's forward or backward.
        in_flight: micro-batches whose forward is done and backward is not, at most.
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
        """What one micro-batch costs this stage: compute and communication."""
        compute = self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds
        return compute + self.recompute_seconds + self.transfer_seconds

    @property
    def backward_seconds(self) -> float:
        """Its whole backward for one micro-batch."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def part_seconds(self) -> tuple[float, float]:
        """The two parts of its backward, each run by itself."""
        whole = self.backward_seconds
        factor = max(0.0, 1 + (self.split_seconds or 0.0) / whole) if whole else 1.0
        return self.backward_input_seconds * factor, self.backward_weight_seconds * factor

    @property
    def parameter_bytes(self) -> int:
        """The parameters."""
        return max(self.static_bytes - self.gradient_bytes - self.optimizer_bytes, 0)

    @property
    def kept_bytes(self) -> int:
        """The most that the stage keeps for its backwards at once."""
        made = self.full_stashes * self.stash_bytes + self.input_only * self.boundary_bytes
        return made + self.deferred_weight_grads * self.deferred_bytes

    @property
    def memory_bytes(self) -> int:
        """The most that the stage holds at once."""
        return self.static_bytes + self.kept_bytes + self.transient_bytes
