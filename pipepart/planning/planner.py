"""``pipepart.plan``: the plan with the shortest predicted step of a profile on a cluster, or why none fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from schedules.searching.clock import Clock

from ..cluster import Cluster
from ..input_error import InputError
from ..profiling import Profile
from ..profiling.progress import progress_bar
from .compression import Compress, compress_links
from .costs.stage_memory import OffloadChoice, RecomputeChoice
from .infeasible import DoesNotFit, Infeasible, exceeds_memory
from .overhead import with_overhead
from .plans.options import PlanOptions, in_order
from .plans.plan import Plan
from .request import Request, check_arguments, read_request
from .search.strategies import SECONDS, infeasible_candidates, search
from .suggestions import InfeasiblePlanError, find_suggestions

# Of the seconds of the search: what finding out why no plan fits, and what would, may take. If the request names its
# seconds, it may also take all that the search leaves.
EXPLAINING_SHARE = 0.2
_REASON_SHARE = 0.25  # of that, for the reason


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "auto",
    micro_batches: int | Literal["auto"] = "auto",
    recompute: RecomputeChoice = "auto",
    offload: OffloadChoice = "auto",
    stages: int | Literal["auto"] = "auto",
    chunks: int | None = None,
    replicas: int | Literal["auto"] = 1,
    max_micro_batches: int | None = None,
    pin: Mapping[str, int] | None = None,
    colocate: Sequence[Collection[str]] = (),
    no_cut_before: Collection[str] = (),
    cut_before: Sequence[str] | None = None,
    allow_split_ties: bool = False,
    reduction: Literal["mean", "sum", "batch"] | None = None,
    compress: Compress = None,
    seconds: float | None = None,
) -> Plan:
    """Return the plan with the shortest predicted step for a profiled chain of layers on the devices of a cluster.

    For each schedule, number of devices, stages and micro-batches, dynamic programming finds the cut with the smallest
    bottleneck that fits the devices, in any order of these. The bottleneck charges each transfer to sender and
    receiver. The simulation of the step then lets transfers overlap with compute. A local search (over all cuts, if
    there are few) goes on to cuts with shorter steps. Then the joint search changes the cut, the placement and the
    order of the actions of the best of these plans together. The plan with the shortest step is returned, with
    others as its ``alternatives``; of equal ones the simplest, which needs the least memory.

    With ``schedule="auto"`` and up to four devices the step is no longer than that of any named schedule with its
    default number of chunks and the same other arguments, unless the search ran out of time (``plan.out_of_time``). On
    more devices not every number of devices is tried under each schedule, and on alike ones a schedule that is 15 %
    slower than another on all of them is not tried on fewer. Asynchronous schedules and ``"chimera"`` are planned only
    if named.

    The smallest bottleneck is proven for schedules with one stage a device. Those with several (``interleaved-1f1b``,
    ``zb-v``, ...) are cut by the step alone.

    Args:
        profile: measured costs of the layers.
        cluster: the devices. Of orders that are equally good its own is taken. Devices that would not make the step
            shorter are left out.
        schedule: a name, ``"auto"`` for the fastest, or ``"search"`` for the fastest, which need not have a name.
        micro_batches: a number that was profiled, or ``"auto"`` for the fastest of those.
        recompute: ``"auto"`` recomputes in stages that would not fit otherwise; ``"never"``, ``"except-last"`` (all
            micro-batches but the last) and ``"always"`` hold for all stages.
        offload: ``"auto"`` also tries stages that keep their stash in the memory of the host between forward and
            backward, where a stage would not fit otherwise and ``host_bandwidth`` of the devices is known. The faster
            of a plan that recomputes and one that offloads is taken. ``"stash"`` offloads in all stages, ``"never"``
            in none.
        stages: their number, or ``"auto"`` for the fastest.
        chunks: stages of each device, for a schedule with several; None for its default, or under ``"auto"`` and
            ``"search"`` for the fastest number.
        replicas: replicas of the model that train in parallel, each on devices of its own with a part of the
            micro-batches; their gradients are summed. ``"auto"`` for the fastest of the numbers that divide the number
            of devices; 1 for a model with a BatchNorm in training, as each replica would have statistics of its own.
        max_micro_batches: upper limit for ``micro_batches="auto"``.
        pin: the stage of a layer, by the layer's name.
        colocate: groups of layers that stay in one stage.
        no_cut_before: layers that no stage begins with.
        cut_before: the layers that the second and later stages begin with: the whole cut.
        allow_split_ties: allow layers that share a parameter to be in different stages if no cut into as many stages
            keeps them together. The later stages then hold a copy of the parameter and of its gradient.
        reduction: that of the pipeline. ``"batch"`` allows only schedules whose last stage runs all forwards before its
            first backward, and counts what the loss of the whole mini-batch needs on the last stage.
        compress: ``"bf16"`` or ``"int8"`` to send activations and their gradients in fewer bytes over the links between
            hosts, or between all devices if there is one host; or a type for each of ``"network"``, between hosts, and
            ``"link"``, within one, as in ``{"network": "int8"}``. Training then has not the numbers of plain training.
            The links of ``plan.cluster`` say how they are compressed.
        seconds: that the call may take. None for 10; with at most 50 layers and 16 devices the search then has a fixed
            effort of one to three seconds of a small server's core. What cannot be simulated in time is left out. Equal
            arguments give equal plans, unless the time ended the search (``plan.out_of_time``).

    Raises:
        TypeError: ``profile`` or ``cluster`` is something else.
        ValueError: an unknown schedule or layer, more stages than layers or devices, micro-batches below 1 or not
            profiled, or constraints that contradict each other.
        InfeasiblePlanError: no cut fits; it names the stage, the missing bytes and changes that fit.
    """
    options = PlanOptions(
        schedule=schedule,
        micro_batches=micro_batches,
        recompute=recompute,
        offload=offload,
        stages=stages,
        chunks=chunks,
        replicas=replicas,
        max_micro_batches=max_micro_batches,
        pin=pin or None,
        colocate=in_order(colocate),
        no_cut_before=in_order(no_cut_before),
        cut_before=in_order(cut_before),
        allow_split_ties=allow_split_ties,
        reduction=reduction,
        compress=compress,
        seconds=seconds,
    )
    check_arguments(profile, cluster, options)
    cluster = compress_links(cluster, options.compress, profile)
    limit = SECONDS if seconds is None else seconds
    clock = Clock(limit)
    try:
        return _planned(profile, cluster, options, clock)
    except DoesNotFit as error:
        request = error.request
    explaining = EXPLAINING_SHARE * limit
    clock = Clock(explaining if seconds is None else max(clock.seconds_left, explaining))
    nearest = _nearest(request, clock)
    if nearest.plan is not None and nearest.plan.fits:
        return nearest.plan  # the cut search counts memory for many cuts at once, and more
    suggestions = find_suggestions(profile, cluster, options, nearest, _planned, clock)
    raise InfeasiblePlanError(nearest, suggestions, out_of_time=clock.cut_short)


def _planned(profile: Profile, cluster: Cluster, options: PlanOptions, clock: Clock) -> Plan:
    """Return the plan of a request.

    Raises:
        DoesNotFit: there is none.
        ValueError: as :func:`plan`.
    """
    profile, cluster = with_overhead(profile, cluster)
    request = read_request(profile, cluster, options)
    if exceeds_memory(request):
        raise DoesNotFit(request)
    with progress_bar(None, "planning", after=1.0) as progress:
        fastest = search(request, clock, progress)
    if fastest is None:
        raise DoesNotFit(request)
    return fastest


def _nearest(request: Request, clock: Clock) -> Infeasible:
    """Return the reason of the candidate that lacks the least memory.

    Raises:
        ValueError: there is no candidate.
    """
    reasons = infeasible_candidates(request, clock.part(_REASON_SHARE))
    nearest = min(reasons, key=lambda reason: reason.deficit_bytes or math.inf, default=None)
    if nearest is None:
        raise InputError(
            f"schedule {request.schedule!r} has no {request.stages} stages on any number of the "
            f"{len(request.cluster)} devices"
        )
    return nearest


def micro_batches_worth_trying(batch: int, stages: int) -> list[int]:
    """Numbers of micro-batches to profile for a mini-batch of ``batch`` samples: more idle less, but cost more each.

    As many as stages, twice and four times that. A micro-batch has at least two samples, as a BatchNorm needs.

    >>> micro_batches_worth_trying(64, stages=2), micro_batches_worth_trying(8, stages=2)
    ([2, 4, 8], [2, 4])
    >>> micro_batches_worth_trying(3, stages=4)
    [1]
    """
    most = max(batch // 2, 1)
    return sorted({min(most, stages * factor) for factor in (1, 2, 4)})
