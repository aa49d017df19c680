"""StagePlan: one stage of a plan, its device and its predicted cost, computed from the profile."""

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
from ..costs.crossings import Crossings
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_links import StageLinks
from ..costs.stage_memory import (
    COLUMNS,
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

_VIRTUAL_COPY_BANDWIDTH = 10e9  # bytes per second that a thread copies in the CPU's memory


class Skip(Value):
    """Live values that a stage sends straight to a stage behind the next one, for one micro-batch.

    Attributes:
        target: the stage that uses them.
        bytes: of all of them.
    """

    target: int = Field(ge=2)
    bytes: ByteCount


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
        skips: live values that it sends past the next stage.
        static_bytes: parameters, gradients, optimizer state and buffers, whatever the number of micro-batches. The
            parameters count once a version under an asynchronous schedule.
        gradient_bytes, optimizer_bytes, buffer_bytes: parts of ``static_bytes``.
        stash_bytes: kept for the backward of each micro-batch in flight, with what waits for the users of ``skips``.
        recompute: the micro-batches for which only the input is kept and the forward is repeated: none, all but the
            last of a step, or all.
        recompute_seconds: of the repeated forward; 0 if it is never repeated.
        offload: "stash" to keep the stash in the memory of the host from shortly after the forward to shortly before
            the backward, for every micro-batch that gains by it.
        boundary_bytes: the input, kept instead of the stash until the forward is repeated, or the stash is back.
        deferred_bytes: kept between the two parts of a split backward for the weight gradients; an upper bound if
            layers share memory.
        workspace_bytes: the most that F, B, I, W, and a B that makes the gradients of the weights, need besides what is
            kept while they run.
        message_bytes: the input, and the gradient of the output, which wait on the device until they are used.
        waiting_messages: the most inputs and gradients that wait at once. Senders do not wait, so before a slow stage
            there may be as many as micro-batches.
        transient_bytes: at the memory peak, the workspace of the action that runs and the messages that wait, less the
            gradients of an asynchronous stage that has none then.
        in_flight: the most micro-batches whose forward has run and whose backward has not.
        full_stashes, input_only, deferred_weight_grads: at the memory peak, the micro-batches kept as full stash, as
            input only, and awaiting their weight gradient. A stash that is being copied counts in full.
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
        """What the stage does with its stash: the recompute mode, or "offload"."""
        return self.recompute if self.offload == "never" else "offload"

    def with_mode(self, mode: Mode) -> Self:
        """Return the stage with another mode; its figures are those of the old one."""
        recompute: Recompute = "never" if mode == "offload" else mode
        return self.model_copy(
            update={"recompute": recompute, "offload": "stash" if mode == "offload" else "never"}
        )

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


def predict_stages(
    stages: Sequence[StagePlan], profile: Profile, costs: ChainCosts, cluster: Cluster
) -> tuple[StagePlan, ...]:
    """Return the stages with the figures of one micro-batch, which follow from layers, devices and recompute modes.

    Args:
        stages: of one replica, in pipeline order.
        profile: has the layers.
        costs: of the layers at the plan's micro-batch size.
        cluster: the devices.
    """
    index = {info.name: position for position, info in enumerate(profile.layers)}
    ranges = [slice(index[stage.layers[0]], index[stage.layers[-1]] + 1) for stage in stages]
    borders = np.array([[layers.start for layers in ranges[1:]]], dtype=np.int64)
    names = [stage.device for stage in stages]
    devices = np.array([[cluster.places.index[name] for name in names]])
    crossings = Crossings(costs, cluster)
    outputs = [*crossings.message_bytes(borders, devices)[0].tolist(), int(costs.output_bytes[-1])]
    skips: list[Counter[int]] = [Counter() for _ in stages]
    if costs.skips:
        transfers = crossings.skips(borders, devices)
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
    """Return a stage with all figures of one micro-batch but the seconds of its transfers."""
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
        optimizer_bytes=sum(map(profile.optimizer_bytes, infos)),
        buffer_bytes=sum(info.buffer_bytes for info in infos),
        stash_bytes=stash,
        boundary_bytes=boundary if stage.mode != "never" else 0,
        deferred_bytes=deferred,
        workspace_bytes=tuple(map(int, sizes.transient[0, 0])),
        message_bytes=tuple(map(int, sizes.messages[0, 0])),
    )


def transfer_seconds(stages: Sequence[StagePlan], names: Sequence[str], cluster: Cluster) -> list[float]:
    """Return the seconds to send and receive the messages of each stage, for one micro-batch.

    A message costs its sender and its receiver. Stages of one device need none. A skip connection adds its bytes to the
    sender's output border and the receiver's input border; its latency is hidden.

    Args:
        stages: of one replica, which know their outputs, skips and gradient bytes.
        names: the device of each stage.
        cluster: has the links.
    """
    borders, links = [0.0], StageLinks(cluster, names)
    trains, ways = False, []
    for stage, (source, target) in zip(stages, pairwise(names), strict=False):
        trains = trains or stage.gradient_bytes > 0
        ways.append(2 if trains else 1)  # no gradient is sent to stages that train nothing
        same = source == target
        once = 0.0 if same else cluster.link_between(source, target).seconds(stage.output_bytes)
        borders.append(ways[-1] * once)
    seconds = [before + behind for before, behind in pairwise([*borders, 0.0])]
    for number, stage in enumerate(stages):
        for skip in stage.skips:
            once = skip.bytes * links.seconds_per_byte(number, skip.target)
            seconds[number] += ways[number] * once
            seconds[skip.target] += ways[skip.target - 1] * once
    return seconds


def with_peaks(stages: Sequence[StagePlan], counts: StashCounts) -> tuple[StagePlan, ...]:
    """Return predicted stages with what each has at its memory peak, and with all versions of their weights."""
    with_figures = []
    for stage, moments, older in zip(stages, counts.by_stage, counts.older, strict=False):
        sizes = sizes_of([stage]).table[0, 0, -COLUMNS:].astype(np.int64)
        kept = moments[:, KEPT].sum(axis=1)
        # Of moments with equal bytes the one with the most micro-batches, so that neighbours do not change the choice.
        peak = moments[np.lexsort((moments[:, STASH], kept, moments @ sizes))[-1]]
        update = {
            "static_bytes": stage.static_bytes + older * stage.gradient_bytes,
            "waiting_messages": int(moments[:, MESSAGES].sum(axis=1).max()),
            "transient_bytes": int(peak[KEPT.stop :] @ sizes[KEPT.stop :]),
            "in_flight": int(kept.max()),
            "full_stashes": int(peak[STASH]),
            "input_only": int(peak[INPUT]),
            "deferred_weight_grads": int(peak[DEFERRED]),
        }
        with_figures.append(stage.model_copy(update=update))
    return tuple(with_figures)


def sizes_of(stages: Sequence[StagePlan]) -> StageSizes:
    """Return the sizes of predicted stages of one device, as one cut."""
    per_micro_batch = [(stage.stash_bytes, stage.boundary_bytes, stage.deferred_bytes) for stage in stages]
    return StageSizes(
        np.array([[stage.static_bytes for stage in stages]], dtype=np.float64),
        np.array([[stage.gradient_bytes for stage in stages]], dtype=np.float64),
        np.array([per_micro_batch], dtype=np.float64),
        np.array([[stage.message_bytes for stage in stages]], dtype=np.float64),
        np.array([[stage.workspace_bytes for stage in stages]], dtype=np.float64),
    )


def copy_seconds(stage: StagePlan, device: Device) -> tuple[float, float]:
    """Return the seconds that a copy of the stage's stash to the host takes, beside the device's work and of it.

    Zeros if the stage does not offload. An accelerator copies beside its work. A virtual device copies by itself, and
    an emulated link to its host takes its time besides.
    """
    if stage.offload == "never":
        return 0.0, 0.0
    size = stage.stash_bytes - stage.boundary_bytes
    beside = size / device.host_bandwidth if device.host_bandwidth else 0.0
    return beside, size / _VIRTUAL_COPY_BANDWIDTH if device.torch_device == "cpu" else 0.0
