"""Request: the checked arguments of ``plan``, and the schedules, chunks and modes that they allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from schedules import Kind, Schedule, build

from ..cluster import Cluster
from ..input_error import InputError, InputTypeError
from ..profiling import Profile
from ..units import counted, is_count
from .compression import compress_links, compressed_tiers
from .constraints import Constraints, read_constraints
from .costs.stage_memory import ModeChoice, OffloadChoice, RecomputeChoice
from .overhead import with_overhead
from .partition.tensor_groups import tensor_groups
from .plans.inside_stage import NOT_INSIDE
from .plans.options import PlanOptions
from .plans.searched_order import SEARCH

# Default stages per device of each schedule that ``"auto"`` tries; None for schedules with one stage per device. The
# simplest schedule comes first: of equally fast plans, the first is chosen.
CHUNKS: dict[str, int | None] = {
    "1f1b": None,
    "gpipe": None,
    "eager-1f1b": None,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "hanayo": 2,
    "zb-h1": None,
    "zb-h2": None,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
    "interleaved-zb": 2,
    "sequential": None,
}
# Schedules that also exist for other numbers of stages per device, if ``chunks`` sets it. The joint search of "auto"
# tries other numbers itself.
ANY_CHUNKS = ("interleaved-1f1b", "looped-bfs", "hanayo", "interleaved-zb")
# Schedules that defer weight gradients (W) to fill idle time.
DEFERRING = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-zb")
# Used only if named, as their training differs from plain training.
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
# Two copies of the model on the same devices. Used only if named, as they need twice the weight memory.
BIDIRECTIONAL = ("chimera",)
# Allowed values of keywords with a fixed set.
_VALUES = {
    "recompute": get_args(RecomputeChoice),
    "offload": get_args(OffloadChoice),
    "reduction": (None, "mean", "sum", "batch"),
}


@dataclass(frozen=True)
class Request:
    """The checked arguments of ``plan``: the input of the search.

    Attributes:
        profile, schedule, stages, chunks: as in :func:`pipepart.plan`. The seconds of ``profile`` are those of layers
            while all devices compute.
        cluster: the devices, or their groups for tensor parallelism.
        all_devices: the devices that each group has; equal to ``cluster`` without groups.
        measured: the profile as measured.
        micro_batches, replicas: the numbers to try.
        seconds: time limit of the search; None to derive the effort from the size of the problem.
        constraints: on the cut, by layer index.
        asked: all keywords, stored in the plan.
    """

    profile: Profile
    measured: Profile
    cluster: Cluster
    all_devices: Cluster
    schedule: str
    micro_batches: tuple[int, ...]
    stages: int | Literal["auto"]
    chunks: int | None
    replicas: tuple[int, ...]
    seconds: float | None
    constraints: Constraints
    asked: PlanOptions

    @property
    def gathers_outputs(self) -> bool:
        """True if the loss is computed once on the outputs of all micro-batches."""
        return self.asked.reduction == "batch"

    @property
    def may_split_ties(self) -> bool:
        """True if layers share parameters and may be in different stages."""
        tied = any(info.shares_with for info in self.profile.layers)
        together = self.schedule in ASYNCHRONOUS or self.asked.inside
        return tied and self.asked.allow_split_ties and not together

    @property
    def mode_choices(self) -> tuple[ModeChoice, ...]:
        """Sets of stage modes to plan with, the set of the ``recompute`` keyword first."""
        asynchronous = self.schedule in ASYNCHRONOUS
        return self.asked.mode_choices(self.cluster, asynchronous)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules to try."""
        names = tuple(CHUNKS) if self.schedule in ("auto", SEARCH) else (self.schedule,)
        return tuple(name for name in names if _is_forwards_first(name)) if self.gathers_outputs else names

    @property
    def searches_orders(self) -> bool:
        """True if the plan may have a searched order of actions, without a schedule name."""
        return self.schedule in ("auto", SEARCH) and not self.gathers_outputs

    def chunks_of(self, schedule: str) -> int | None:
        """Return the number of stages per device under a schedule; None if ``chunks`` rules the schedule out."""
        default = CHUNKS.get(schedule) or 1
        if self.chunks in (None, default) or schedule in ANY_CHUNKS:
            return self.chunks or default
        return None


def runs_forwards_first(schedule: Schedule) -> bool:
    """Return True if a schedule has one copy of the model, whose last stage runs all forwards before backwards."""
    last = schedule.stages - 1
    row = schedule.actions[schedule.device_of[last]]
    kinds = [action.kind for pair in row for action in pair.leaves if action.stage == last]
    backward = next((index for index, kind in enumerate(kinds) if kind in (Kind.B, Kind.I)), len(kinds))
    return schedule.replicas == 1 and Kind.F not in kinds[backward:]


def _is_forwards_first(name: str) -> bool:
    return runs_forwards_first(build(name, devices=2, micro_batches=4, chunks=CHUNKS.get(name) or 1))


def read_request(measured: Any, cluster: Any, options: PlanOptions) -> Request:
    """Check the arguments of :func:`pipepart.plan` and return them as a request.

    Raises:
        TypeError, ValueError: as :func:`pipepart.plan` does.
    """
    if not isinstance(measured, Profile):
        raise InputTypeError(f"plan needs a Profile, as pipepart.profile returns it, got {measured!r:.80}")
    if not isinstance(cluster, Cluster):
        raise InputTypeError(
            f"plan needs a Cluster, got {cluster!r:.80}: write for example pipepart.Cluster.virtual(2)"
        )
    check_options(options, cluster)
    if measured.tensor not in (1, options.tensor):
        raise InputError(
            f"the profile has what one of {measured.tensor} processes has of each layer: plan with "
            f"tensor={measured.tensor}, got tensor={options.tensor}"
        )
    cluster = compress_links(cluster, options.compress, measured)
    profile, all_devices = with_overhead(measured, cluster)
    cluster = tensor_groups(all_devices, options.tensor)
    constraints = read_constraints(profile, options.colocate, options.cut_before)
    stages = constraints.stages or "auto" if options.stages == "auto" else options.stages
    if constraints.stages not in (None, stages):
        raise InputError(
            f"cut_before is the whole cut and makes {counted(constraints.stages, 'stage')}, got stages={stages!r}: "
            "leave stages out"
        )
    replicas = _replicas(options.replicas, len(cluster), least=2 if options.shard else 1)
    if options.replicas == "auto" and profile.writes_statistics and not options.shard:
        replicas = (1,)  # each replica would see its own micro-batches only
    devices, layers = len(cluster) // replicas[0], len(profile.layers)
    default = layers if options.schedule in ("auto", SEARCH) else CHUNKS.get(options.schedule) or 1
    most = min(devices * (options.chunks or default), layers)
    if stages != "auto" and not (is_count(stages) and stages <= most):
        raise InputError(
            f"stages must be between 1 and {most} ({devices} devices, {layers} layers), got {stages!r}"
        )
    return Request(
        profile=profile,
        measured=measured,
        cluster=cluster,
        all_devices=all_devices,
        schedule=options.schedule,
        micro_batches=_micro_batches(profile, options.micro_batches),
        stages=stages,
        chunks=options.chunks,
        replicas=replicas,
        seconds=options.seconds,
        constraints=constraints,
        asked=options,
    )


def check_options(options: PlanOptions, cluster: Cluster) -> None:
    """Check the keywords that need no profile, for example before a model is profiled.

    Raises:
        ValueError: an unknown schedule or recompute mode, a number that is invalid or too small, keywords that
            contradict each other, or links that the cluster does not have.
    """
    known, chunks = (*CHUNKS, *ASYNCHRONOUS, *BIDIRECTIONAL), options.chunks
    if options.schedule not in ("auto", SEARCH, *known):
        raise InputError(
            f"no plan is made for schedule {options.schedule!r}: choose one of {', '.join(known)}, {SEARCH!r} or "
            "'auto'"
        )
    for name, values in _VALUES.items():
        if getattr(options, name) not in values:
            known = ", ".join(map(repr, values))
            raise InputError(f"{name} must be one of {known}, got {getattr(options, name)!r}")
    for name, free in (("micro_batches", "auto"), ("chunks", None)):
        value = getattr(options, name)
        if value != free and not is_count(value):
            also = f"{free!r} or " if free else ""
            raise InputError(f"{name} must be {also}a whole number of at least 1, got {value!r}")
    if options.offload == "stash":
        _check_offload(options, cluster)
    compressed_tiers(options.compress, cluster)
    if options.seconds is not None and not (
        isinstance(options.seconds, int | float) and 0 < options.seconds < math.inf
    ):
        raise InputError(f"seconds must be None or a finite number above 0, got {options.seconds!r}")
    groups = len(tensor_groups(cluster, options.tensor)) if is_count(options.tensor) else 0
    _check_inside(options, groups)
    _replicas(options.replicas, groups)
    if options.reduction == "batch" and (
        options.replicas != 1
        or options.schedule == SEARCH
        or (options.schedule != "auto" and not _is_forwards_first(options.schedule))
    ):
        raise InputError(
            "reduction='batch' computes the loss on the outputs of all micro-batches: it needs replicas=1 and a "
            "schedule whose last stage runs all forwards first, as schedule='gpipe' or 'auto'; got "
            f"schedule={options.schedule!r}, replicas={options.replicas!r}"
        )
    if chunks is None:
        return
    single = (name for name, default in CHUNKS.items() if default is None)
    if chunks > 1 and options.schedule in (*single, *ASYNCHRONOUS, *BIDIRECTIONAL):
        several = ", ".join(name for name, default in CHUNKS.items() if default)
        raise InputError(
            f"schedule {options.schedule!r} has one stage a device, got chunks={chunks}: schedules with several are "
            f"{several}"
        )
    if options.schedule in CHUNKS:
        build(
            options.schedule, devices=2, micro_batches=4, chunks=chunks
        )  # raises if the schedule needs another number of chunks


def refuse_asynchronous(schedule: str) -> None:
    """Raise an error if a schedule needs an optimizer per stage, for a pipeline without optimizers.

    Raises:
        ValueError: the schedule is asynchronous.
    """
    if schedule in ASYNCHRONOUS:
        raise InputError(
            f"schedule {schedule!r} is asynchronous and wants an optimizer a stage: make the pipeline with "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def _check_inside(options: PlanOptions, groups: int) -> None:
    """Check that stages can be parallel inside as the request asks."""
    if not groups:
        raise InputError(f"tensor must be a whole number of at least 1, got {options.tensor!r}")
    if options.shard and (groups < 2 or options.replicas == 1):
        raise InputError(
            "shard=True shards the parameters of each stage over its replicas: it needs replicas='auto' or at least 2, "
            f"and devices for them; got replicas={options.replicas!r} and {counted(groups, 'device')}"
            + (f" of {options.tensor} processes" if options.tensor > 1 else "")
        )
    if not options.inside:
        return
    if options.schedule in NOT_INSIDE:
        raise InputError(
            f"schedule {options.schedule!r} has several versions or copies of the weights, and tensor= and shard= need "
            "one: choose another schedule"
        )
    if options.offload == "stash":
        raise InputError("offload='stash' cannot be combined with tensor= or shard=: use recompute=")


def _check_offload(options: PlanOptions, cluster: Cluster) -> None:
    """Check that all stages can offload their stashes, and that the seconds for this can be predicted."""
    if options.recompute not in ("auto", "never"):
        raise InputError(
            f"offload='stash' keeps the stashes of all stages on their hosts, and recompute={options.recompute!r} "
            "makes them again: choose one of the two"
        )
    if options.schedule in ASYNCHRONOUS:
        raise InputError(
            "offload='stash' is not possible under asynchronous schedules, whose stages keep versions of their "
            "weights: choose another schedule"
        )
    for device in cluster.devices:
        if device.host_bandwidth is None and device.torch_device != "cpu":
            raise InputError(
                f"offload='stash' needs the bandwidth between {device.name!r} and its host, host_bandwidth of the "
                "device: describe it, as Cluster.parse(..., host_link='25GB/s') does"
            )


def _replicas(replicas: int | Literal["auto"], devices: int, least: int = 1) -> tuple[int, ...]:
    if replicas == "auto":
        return tuple(count for count in range(least, devices + 1) if devices % count == 0)
    if not is_count(replicas) or replicas > devices:
        raise InputError(
            f"replicas must be between 1 and the number of devices, {devices}, or 'auto', got {replicas!r}"
        )
    return (replicas,)


def _micro_batches(profile: Profile, micro_batches: int | Literal["auto"]) -> tuple[int, ...]:
    if micro_batches == "auto":
        return tuple(costs.micro_batches for costs in profile.costs)
    return (profile.at(micro_batches).micro_batches,)
