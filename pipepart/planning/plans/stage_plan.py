"""StagePlan: one stage of a plan, with its layers, its device and its predicted seconds and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from pydantic import Field

from ...cluster import Cluster, Device
from ...document import ByteCount, Seconds, Value
from ...profiling import Profile
from ..costs.layer_ranges import ChainCosts, split_share
from ..costs.stage_memory import (
    DEFERRED,
    INPUT,
    KEPT,
    MESSAGES,
    STASH,
    Mode,
    Offload,
    Recompute,
    StageSizes,
    StashCounts,
)

_VIRTUAL_COPY_BANDWIDTH = 10e9  # bytes per second of a copy by one CPU thread


class Skip(Value):
    """A skip connection: live values that a stage sends past the next stage, for one micro-batch.

    Attributes:
        target: the stage that uses the values.
        bytes: total bytes of the values.
    """

    target: int = Field(ge=2)
    bytes: ByteCount


class StagePlan(Value):
    """One stage: consecutive layers of the model on one device. Seconds and bytes are for one micro-batch.

    Attributes:
        layers: names of its layers, in execution order.
        device: name of its device in the plan's cluster.
        forward_seconds, backward_input_seconds, backward_weight_seconds: predicted compute.
        split_seconds: extra seconds of I and W over a full backward; negative if I and W are faster, None if not
            measured.
        transfer_seconds: seconds to transfer its inputs, its outputs and their gradients.
        output_bytes: bytes sent to the next stage, or returned by the last stage.
        skips: live values that it sends past the next stage.
        static_bytes: parameters, gradients, optimizer state and buffers, independent of the number of micro-batches.
            Under an asynchronous schedule, the parameters count once per version. If replicas share the parameters, all
            parameters and one shard of them count.
        gradient_bytes, optimizer_bytes, buffer_bytes: parts of ``static_bytes``.
        stash_bytes: bytes held for the backward of each micro-batch in flight, including values that wait for the users
            of ``skips``.
        recompute: for which micro-batches the stage holds only the input and recomputes the forward: none, all but the
            last of a step, or all.
        recompute_seconds: seconds of a recomputed forward; 0 for ``recompute="never"``.
        offload: "stash" to hold the stash in host memory from shortly after the forward to shortly before the backward,
            for every micro-batch that gains by it.
        boundary_bytes: bytes of the input, held instead of the stash until the forward is recomputed or the stash is
            copied back.
        deferred_bytes: bytes held between I and W for the weight gradients; an upper bound if layers share memory.
        workspace_bytes: [5]: largest extra bytes while F, B, I, W, or a B that allocates the weight gradients runs.
        message_bytes: [2]: bytes of the input, and of the gradient of the output, while they wait on the device.
        waiting_messages: largest number of inputs and gradients that wait at once. Senders do not block, so it may
            reach the number of micro-batches before a slow stage.
        transient_bytes: at the memory peak, the workspace of the running action and the waiting messages, less the
            weight gradients if an asynchronous stage holds none at that moment.
        in_flight: largest number of micro-batches between their forward and their backward.
        full_stashes, input_only, deferred_weight_grads: at the memory peak, the number of micro-batches held as full
            stash, as input only, and waiting for W. A stash that is being copied counts in full.
    """

    layers: tuple[str, ...] = Field(min_length=1)
    device: str
    forward_seconds: Seconds = 0.0
    backward_input_seconds: Seconds = 0.0
    backward_weight_seconds: Seconds = 0.0
    split_seconds: float | None = Field(default=None, allow_inf_nan=False)
    transfer_seconds: Seconds = 0.0
    output_bytes: ByteCount = 0
    skips: tuple[Skip, ...] = ()
    static_bytes: ByteCount = 0
    gradient_bytes: ByteCount = 0
    optimizer_bytes: ByteCount = 0
    buffer_bytes: ByteCount = 0
    stash_bytes: ByteCount = 0
    recompute: Recompute = "never"
    recompute_seconds: Seconds = 0.0
    offload: Offload = "never"
    boundary_bytes: ByteCount = 0
    deferred_bytes: ByteCount = 0
    workspace_bytes: tuple[ByteCount, ...] = Field(default=(0,) * 5, min_length=5, max_length=5)
    message_bytes: tuple[ByteCount, ...] = Field(default=(0, 0), min_length=2, max_length=2)
    waiting_messages: int = Field(default=0, ge=0)
    transient_bytes: int = 0
    in_flight: int = Field(default=0, ge=0)
    full_stashes: int = Field(default=0, ge=0)
    input_only: int = Field(default=0, ge=0)
    deferred_weight_grads: int = Field(default=0, ge=0)

    @property
    def mode(self) -> Mode:
        """How the stage stores its stash: the recompute mode, or "offload"."""
        return self.recompute if self.offload == "never" else "offload"

    def with_mode(self, mode: Mode) -> Self:
        """Return the stage with another mode; its predictions are not updated."""
        recompute: Recompute = "never" if mode == "offload" else mode
        return self.model_copy(
            update={"recompute": recompute, "offload": "stash" if mode == "offload" else "never"}
        )

    @property
    def load_seconds(self) -> float:
        """Seconds of compute and communication for one micro-batch."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds + self.transfer_seconds

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def part_seconds(self) -> tuple[float, float]:
        """Seconds of I and of W, if they run separately."""
        share = float(split_share(self.split_seconds or 0.0, self.backward_seconds))
        return self.backward_input_seconds * share, self.backward_weight_seconds * share

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters, in all versions."""
        return max(self.static_bytes - self.gradient_bytes - self.optimizer_bytes - self.buffer_bytes, 0)

    @property
    def kept_bytes(self) -> int:
        """Bytes held for backwards at the memory peak."""
        stashes = self.full_stashes * self.stash_bytes + self.input_only * self.boundary_bytes
        return stashes + self.deferred_weight_grads * self.deferred_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory peak of the stage."""
        return self.static_bytes + self.kept_bytes + self.transient_bytes


def predict_stages(
    stages: Sequence[StagePlan], profile: Profile, costs: ChainCosts, cluster: Cluster
) -> tuple[StagePlan, ...]:
    """Return the stages with predicted seconds and bytes of one micro-batch, without memory peaks.

    Args:
        stages: of one replica, in pipeline order; only their layers, devices and modes are read.
        profile: has the layers.
        costs: of the layers at the plan's micro-batch size.
        cluster: the devices.
    """
    index = {info.name: position for position, info in enumerate(profile.layers)}
    ranges = [slice(index[stage.layers[0]], index[stage.layers[-1]] + 1) for stage in stages]
    borders = np.array([[layers.start for layers in ranges[1:]]], dtype=np.int64)
    names = [stage.device for stage in stages]
    outputs = [*costs.message_bytes(borders)[0].tolist(), int(costs.output_bytes[-1])]
    skips: list[Counter[int]] = [Counter() for _ in stages]
    if costs.skips:
        transfers = costs.skips.transfers(borders)
        for source, target, size in zip(*(row[0].tolist() for row in transfers), strict=True):
            skips[source][target] += size
    predicted = []
    for stage, layers, output_bytes, skip_bytes in zip(stages, ranges, outputs, skips, strict=True):
        skipping = tuple(Skip(target=to, bytes=size) for to, size in sorted(skip_bytes.items()) if size)
        predicted.append(_predicted(stage, layers, profile, costs, cluster, output_bytes, skipping))
    seconds = transfer_seconds(predicted, names, cluster)
    return tuple(
        stage.model_copy(update={"transfer_seconds": crossing})
        for stage, crossing in zip(predicted, seconds, strict=True)
    )


def _predicted(
    stage: StagePlan,
    layers: slice,
    profile: Profile,
    costs: ChainCosts,
    cluster: Cluster,
    output_bytes: int,
    skips: tuple[Skip, ...],
) -> StagePlan:
    """Return a stage with predicted seconds and bytes of one micro-batch, except ``transfer_seconds``."""
    infos, speed = profile.layers[layers], cluster.device(stage.device).speed
    forward = float(costs.forward[layers].sum()) / speed
    waiting = sum(skip.bytes for skip in skips) if costs.has_backward[layers.stop - 1] else 0
    sizes = costs.sizes(layers).with_waiting(np.array([[waiting]]))
    stash, boundary, deferred = map(int, sizes.per_micro_batch[0, 0])
    return StagePlan(
        layers=stage.layers,
        device=stage.device,
        recompute=stage.recompute,
        offload=stage.offload,
        output_bytes=output_bytes,
        skips=skips,
        forward_seconds=forward,
        backward_input_seconds=float(costs.backward_input[layers].sum()) / speed,
        backward_weight_seconds=float(costs.backward_weight[layers].sum()) / speed,
        split_seconds=None if costs.split is None else float(costs.split[layers].sum()) / speed,
        recompute_seconds=forward if stage.recompute != "never" else 0.0,
        static_bytes=int(sizes.static[0, 0]),
        gradient_bytes=sum(info.gradient_bytes for info in infos),
        optimizer_bytes=sum(-(-profile.optimizer_bytes(info) // costs.shards) for info in infos),
        buffer_bytes=sum(info.buffer_bytes for info in infos),
        stash_bytes=stash,
        boundary_bytes=boundary if stage.mode != "never" else 0,
        deferred_bytes=deferred,
        workspace_bytes=tuple(map(int, sizes.transient[0, 0])),
        message_bytes=tuple(map(int, sizes.messages[0, 0])),
    )


def transfer_seconds(stages: Sequence[StagePlan], names: Sequence[str], cluster: Cluster) -> list[float]:
    """Return [stages]: seconds to send and receive all messages of one micro-batch.

    A message costs its sender and its receiver. Adjacent stages on one device exchange none. A skip connection adds its
    bytes to the sender's output border and the receiver's input border; its latency is hidden.

    Args:
        stages: of one replica, with output_bytes, skips and gradient_bytes.
        names: the device of each stage.
        cluster: has the links.
    """
    borders = [0.0]
    trains, messages = False, []
    for stage, (source, target) in zip(stages, pairwise(names), strict=False):
        trains = trains or stage.gradient_bytes > 0
        # Activation and gradient; stages that train nothing get no gradient.
        messages.append(2 if trains else 1)
        same = source == target
        once = 0.0 if same else cluster.link_between(source, target).seconds(stage.output_bytes)
        borders.append(messages[-1] * once)
    seconds = [before + behind for before, behind in pairwise([*borders, 0.0])]
    for number, stage in enumerate(stages):
        for skip in stage.skips:
            ends = names[number], names[skip.target]
            once = 0.0 if ends[0] == ends[1] else skip.bytes * cluster.link_between(*ends).seconds_per_byte
            seconds[number] += messages[number] * once
            seconds[skip.target] += messages[skip.target - 1] * once
    return seconds


def with_peaks(stages: Sequence[StagePlan], counts: StashCounts) -> tuple[StagePlan, ...]:
    """Return predicted stages with the fields of their memory peaks, and with all versions of their weights."""
    with_figures = []
    for stage, moments, older in zip(stages, counts.by_stage, counts.older, strict=False):
        sizes = sizes_of([stage]).counted[0, 0].astype(np.int64)
        held = moments[:, KEPT].sum(axis=1)
        # Of moments with equal bytes, choose the most micro-batches: the choice must not depend on neighbours.
        peak = moments[np.lexsort((moments[:, STASH], held, moments @ sizes))[-1]]
        update = {
            "static_bytes": stage.static_bytes + older * stage.gradient_bytes,
            "waiting_messages": int(moments[:, MESSAGES].sum(axis=1).max()),
            "transient_bytes": int(peak[KEPT.stop :] @ sizes[KEPT.stop :]),
            "in_flight": int(held.max()),
            "full_stashes": int(peak[STASH]),
            "input_only": int(peak[INPUT]),
            "deferred_weight_grads": int(peak[DEFERRED]),
        }
        with_figures.append(stage.model_copy(update=update))
    return tuple(with_figures)


def sizes_of(stages: Sequence[StagePlan]) -> StageSizes:
    """Return the sizes of the predicted stages of one device, with leading dimension 1 for a single cut."""
    rows = [
        (
            stage.static_bytes,
            stage.gradient_bytes,
            *(stage.stash_bytes, stage.boundary_bytes, stage.deferred_bytes),
            *stage.message_bytes,
            *stage.workspace_bytes,
            stage.gradient_bytes,
        )
        for stage in stages
    ]
    return StageSizes(np.array([rows], dtype=np.float64))


def copy_seconds(stage: StagePlan, device: Device) -> tuple[float, float]:
    """Return seconds to copy the stash to the host: (overlapped with compute, device busy); zeros without offload.

    An accelerator overlaps the copy with compute. A virtual device is busy during the copy, and an emulated link to its
    host adds overlapped seconds.
    """
    if stage.offload == "never":
        return 0.0, 0.0
    size = stage.stash_bytes - stage.boundary_bytes
    beside = size / device.host_bandwidth if device.host_bandwidth else 0.0
    return beside, size / _VIRTUAL_COPY_BANDWIDTH if device.torch_device == "cpu" else 0.0
