"""Makes the plan: for each schedule and number of micro-batches the best cut, and of these the fastest step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

from schedules.searching.clock import Clock

from ..cluster import Cluster
from ..input_error import InputError
from ..profiling import Profile
from ..profiling.progress import progress_bar
from .compression import Compress, compress_links
from .costs.stage_memory import OffloadChoice, RecomputeChoice
from .infeasible import DoesNotFit
from .overhead import with_overhead
from .plans.options import PlanOptions, in_order
from .plans.plan import Plan
from .request import check_arguments, read_request
from .search.strategies import SECONDS, infeasible_candidates, search
from .suggestions import InfeasiblePlanError, find_suggestions


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
    bottleneck that fits the devices, in any order of these. The bottleneck counts a transfer on both of its devices, as
    if it did not overlap with compute; the step, in which it does, is then simulated. A local search (over all cuts, if
    there are few) goes on to cuts with shorter steps. Then the joint search changes the cut, the placement and the
    order of the actions of the best of these plans together. The plan with the shortest step is returned, with
    others as its ``alternatives``; of equal ones the simplest, which needs the least memory.

    With ``schedule="auto"`` the step is no longer than with any named schedule, number of chunks or stages, or
    ``"search"``, with the same other arguments. Asynchronous schedules and ``"chimera"`` are planned only if named.

    With several stages a device (``interleaved-1f1b``, ``zb-v``, ...) the smallest bottleneck is exact if there are at
    most 3,000 cuts and 24 orders of the devices, else the best that a local search finds.

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
            of recompute and offload is taken, stage by stage. ``"stash"`` offloads in all stages, ``"never"`` in none.
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
        seconds: that the search may take. None for 10, or for a part of a second with at most 50 layers, 4 devices and
            16 micro-batches. One plan of each schedule is made even if that takes longer, unless the product of stages
            and micro-batches is above 1,024. Equal arguments give equal plans, unless a slow machine takes longer than
            ``seconds``.

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
    clock = Clock(SECONDS if seconds is None else seconds)
    try:
        return _made(profile, cluster, options)
    except DoesNotFit as error:
        nearest = error.nearest
    suggestions = find_suggestions(profile, cluster, options, nearest, _made, clock)
    raise InfeasiblePlanError(nearest, suggestions, out_of_time=clock.cut_short)


def _made(profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """The plan of a request.

    Raises:
        DoesNotFit: there is none.
        ValueError: as :func:`plan`.
    """
    profile, cluster = with_overhead(profile, cluster)
    if not profile.edges:
        return _plan_chain(profile, cluster, options)
    from .branched import MOST_ORDERS, plan_branched  # which needs scipy

    chain = partial(_plan_chain, cluster=cluster, options=options, share=MOST_ORDERS)
    return plan_branched(profile, cluster, chain, options.colocate, options.allow_split_ties)


def _plan_chain(profile: Profile, cluster: Cluster, options: PlanOptions, share: int = 1) -> Plan:
    request = read_request(profile, cluster, options)
    with progress_bar(None, "planning", after=1.0) as progress:
        found = search(request, progress, share)
    if found is not None:
        return found
    explained = infeasible_candidates(
        request, Clock(SECONDS if options.seconds is None else options.seconds / 4)
    )
    nearest = min(explained, key=lambda one: one.deficit_bytes or math.inf, default=None)
    if nearest is None:
        raise InputError(
            f"schedule {options.schedule!r} has no {request.stages} stages on any number of the {len(cluster)} devices"
        )
    if (
        nearest.plan is not None and nearest.plan.fits
    ):  # the cut search counts memory for many cuts at once, and more
        return nearest.plan
    raise DoesNotFit(nearest)


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
