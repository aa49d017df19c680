"""``pipepart.plan``: returns the plan with the shortest predicted step, or raises an error with changes that fit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from schedules.searching.clock import Clock, OutOfTime

from ..cluster import Cluster
from ..input_error import InputError
from ..profiling import Profile
from .compression import Compress
from .costs.stage_memory import OffloadChoice, RecomputeChoice
from .costs.step_bound import bound_on_cluster
from .plans.options import PlanOptions, in_order
from .plans.plan import Plan
from .request import Request, read_request
from .search.strategies import SECONDS, NoPlan, search
from .suggestions import Changes, InfeasiblePlanError, Suggestion

# If no plan fits: time to find changes that fit, as a share of the time limit of the search. If the request sets
# ``seconds``, the rest of the search's time may be used as well; if the search ran out of time, no more than this rest.
EXPLAINING_SHARE = 0.1
_IMPROVING_SECONDS = 1.0  # time to plan changes that may give a shorter step


def plan(
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    *,
    schedule: str = "auto",
    micro_batches: int | Literal["auto"] = "auto",
    recompute: RecomputeChoice = "auto",
    offload: OffloadChoice = "auto",
    stages: int | Literal["auto"] = "auto",
    chunks: int | None = None,
    replicas: int | Literal["auto"] = 1,
    tensor: int | Literal["auto"] = 1,
    shard: bool = False,
    colocate: Sequence[Collection[str]] = (),
    cut_before: Sequence[str] | None = None,
    allow_split_ties: bool = False,
    reduction: Literal["mean", "sum", "batch"] | None = None,
    compress: Compress = None,
    seconds: float | None = None,
) -> Plan:
    """Return the plan with the shortest predicted step for a profiled chain of layers on the devices of a cluster.

    For each schedule, number of devices, stages and micro-batches, dynamic programming finds the cut with the smallest
    bottleneck that fits the devices, over all orders of the devices. The bottleneck charges each transfer to sender and
    receiver. The simulation of the step then lets transfers overlap with compute. A local search (or all cuts, if
    there are few) then looks for cuts with shorter steps. Finally the joint search starts from the best plans and
    changes cut, placement and order of actions together. The plan with the shortest step is returned, with other plans
    as its ``alternatives``. Of plans with equal steps, the simplest with the least memory is returned.

    With ``schedule="auto"`` and up to four devices the step is no longer than that of any named schedule with its
    default number of chunks and otherwise equal arguments, unless the time limit (``plan.out_of_time``) or the fixed
    effort of a request with many choices ended the search before. On more devices, not every number of devices is tried
    under each schedule. Asynchronous schedules and ``"chimera"`` are planned only if named.

    For schedules with one stage per device, the smallest bottleneck is proven. Cuts for schedules with several stages
    per device (``interleaved-1f1b``, ``zb-v``, ...) minimise the simulated step directly.

    Args:
        profile: measured costs of the layers; for ``tensor="auto"`` several profiles, one for each number to try.
        cluster: the devices. If orders of devices are equally fast, the order of the cluster is kept. Devices that
            would not shorten the step are not used.
        schedule: a schedule name; ``"auto"`` for the fastest schedule; or ``"search"`` for the fastest schedule, whose
            order of actions need not have a name.
        micro_batches: a number that was profiled, or ``"auto"`` for the fastest profiled number.
        recompute: ``"auto"`` recomputes in stages that would not fit otherwise; ``"never"``, ``"except-last"`` (all
            micro-batches but the last) and ``"always"`` hold for all stages.
        offload: ``"auto"`` also tries to hold stashes in host memory between forward and backward, for stages that
            would not fit otherwise, if ``host_bandwidth`` of the devices is known. The faster plan is returned, with
            recompute or with offload. ``"stash"`` offloads in all stages, ``"never"`` in none.
        stages: number of stages, or ``"auto"`` for the fastest number.
        chunks: number of stages per device, for a schedule with several; None for the default of the schedule. The
            joint search of ``"auto"`` and ``"search"`` tries any number.
        replicas: number of replicas of the model that train in parallel, each on separate devices with a part of the
            micro-batches; their gradients are summed. ``"auto"`` for the fastest divisor of the number of devices; 1
            for a model with a BatchNorm in training, as replicas would have different statistics.
        tensor: number of devices that share the layers of each stage, by ``Pipeline(..., parallelize=f)`` under
            torchrun. Each group of so many consecutive devices is planned as one device, with the name of its first
            member; its members must be alike. A device of the plan is then such a group, also for ``replicas``. The
            costs of one of the devices are in a profile of ``pipepart.profile(..., parallelize=f, tensor=n)``; those of
            another profile are taken for whole layers, without collectives. ``"auto"`` for the fastest of several
            profiles. If groups have different speeds, collectives of the slower ones are priced too long.
        shard: shard the parameters of each stage over its replicas, by ``Pipeline(..., parallelize=f)`` with
            ``fully_shard`` under torchrun. Needs two replicas at least. During the step each replica has all parameters
            and gradients of the stage besides its shard of the parameters and of the optimizer state.
        colocate: groups of layers that stay in one stage.
        cut_before: first layer of each stage from the second on; defines the whole cut.
        allow_split_ties: allow layers that share a parameter to be in different stages if cuts that keep them together
            have fewer stages than the devices run (or than ``stages``). The later stages then hold a copy of the
            parameter and of its gradient.
        reduction: the ``reduction`` of the pipeline. ``"batch"`` allows only schedules whose last stage runs all
            forwards before its first backward, and counts the memory of the loss of the whole mini-batch.
        compress: ``"bf16"`` or ``"int8"`` to send activations and their gradients in fewer bytes over the links between
            hosts, or between all devices if there is one host. A mapping sets the type for ``"network"`` (between
            hosts) and ``"link"`` (within a host), as in ``{"network": "int8"}``. Training results then differ from
            plain training. The links of ``plan.cluster`` store the compression.
        seconds: time limit of the call; None for 10. With None, at most 50 layers and at most 16 devices, the search
            has a fixed effort of one to three seconds on a core of a small server: ``plan.alternatives`` names
            schedules that it had no time for. Equal arguments give equal plans, unless the time limit ended the search
            (``plan.out_of_time``).

    Raises:
        TypeError: ``profile`` or ``cluster`` has another type.
        ValueError: an unknown schedule or layer, more stages than layers or devices, micro-batches below 1 or not
            profiled, or constraints that contradict each other.
        InfeasiblePlanError: no cut fits the memory, or none was found in the time; names the stage, the missing bytes
            and changes that fit.
    """
    options = PlanOptions(
        schedule=schedule,
        micro_batches=micro_batches,
        recompute=recompute,
        offload=offload,
        stages=stages,
        chunks=chunks,
        replicas=replicas,
        shard=shard,
        colocate=in_order(colocate),
        cut_before=in_order(cut_before),
        allow_split_ties=allow_split_ties,
        reduction=reduction,
        compress=compress,
        seconds=seconds,
    )
    requests = _requests(profile, cluster, options, tensor)
    limit = SECONDS if seconds is None else seconds
    clock = Clock(limit)
    fastest: Plan | None = None
    failed: list[NoPlan] = []
    for number, request in enumerate(requests):
        if fastest is None or _bound(request) < _step(fastest):
            left = len(requests) - number
            best = search(request, clock if left == 1 else clock.part(1 / left))
            if isinstance(best, NoPlan):
                failed.append(best)
                continue
            best = _with_measured(request.measured, best)
            if fastest is None or _step(best) < _step(fastest):
                fastest = best
    if fastest is not None:
        return fastest
    # The most devices for a stage need the least memory.
    search_of_most = max(failed, key=lambda each: each.request.asked.tensor)
    request, nearest = search_of_most.request, search_of_most.explain()
    if isinstance(nearest, Plan):
        return _with_measured(request.measured, nearest)
    explaining = EXPLAINING_SHARE * limit
    if clock.cut_short:
        explaining = min(clock.seconds_left, explaining)
    elif seconds is not None:
        explaining = max(clock.seconds_left, explaining)
    changing = Clock(explaining)
    changes = Changes(request.measured, request.all_devices, request.asked, _planned, changing)
    raise InfeasiblePlanError(
        nearest, changes.that_fit(nearest), searched_all=not clock.cut_short, out_of_time=changing.cut_short
    )


def _requests(
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    tensor: int | Literal["auto"],
) -> list[Request]:
    """Return the request for each number of devices that may share a stage, the one with the lowest bound first.

    Raises:
        TypeError, ValueError: as :func:`plan` does.
    """
    if tensor != "auto":
        return [read_request(profile, cluster, replace(options, tensor=tensor))]
    profiles = [profile] if isinstance(profile, Profile) else list(profile)
    requests: list[Request] = []
    refused: InputError | None = None
    for each in profiles:
        try:
            requests.append(read_request(each, cluster, replace(options, tensor=each.tensor)))
        except InputError as error:  # this number makes no groups that the request can have
            refused = refused or error
    if not requests:
        raise refused or InputError('tensor="auto" chooses from several profiles, got none')
    return sorted(requests, key=_bound) if len(requests) > 1 else requests


def _step(plan: Plan) -> float:
    return plan.predicted.step_seconds


def _bound(request: Request) -> float:
    """Return a lower bound in seconds of the step of every plan of a request."""
    return min(
        bound_on_cluster(request.measured, request.all_devices, count, replicas, request.asked.tensor)
        for count in request.micro_batches
        for replicas in request.replicas
    )


def shorter_steps(plan: Plan, edited: bool) -> list[Suggestion]:
    """Return changes of a plan's request that give a shorter step under its schedule, the shortest step first.

    Args:
        plan: with a profile, whose costs may have changed since it was planned.
        edited: True to try the unchanged request as well: the plan is not the fastest for its costs.
    """
    assert plan.profile is not None
    asked = replace(
        plan.constraints,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        chunks=plan.chunks if plan.chunks > 1 else None,
        replicas=plan.replicas,
    )
    changes = Changes(plan.profile, plan.cluster, asked, _planned, Clock(_IMPROVING_SECONDS))
    known = {alternative.micro_batches for alternative in plan.alternatives}
    tried = [asked] if edited else []
    tried += [
        each for each in changes.single(asked) if each.micro_batches not in known - {plan.micro_batches}
    ]
    return [each for each in changes.planned(tried) if each.step_seconds < plan.predicted.step_seconds]


def _planned(profile: Profile, cluster: Cluster, options: PlanOptions, clock: Clock) -> Plan | None:
    """Return the fastest plan; None if no plan fits, or the time is over."""
    with suppress(OutOfTime):
        fastest = search(read_request(profile, cluster, options), clock, answers=False)
        return _with_measured(profile, fastest) if isinstance(fastest, Plan) else None
    return None


def _with_measured(profile: Profile, searched: Plan) -> Plan:
    """Return a plan with the profile as measured, and layers as slow as they are beside the devices in use.

    The search took them to be as slow as beside all devices, and some may stay unused.
    """
    measured = profile.model_copy(update={"costs": (profile.at(searched.micro_batches),)})
    result = searched.model_copy(update={"profile": measured})
    as_searched = searched.profile is not None and result.with_overhead()[0].costs == searched.profile.costs
    return result if as_searched else result.predict()


def micro_batches_worth_trying(batch: int, stages: int) -> list[int]:
    """Return numbers of micro-batches to profile for a mini-batch of ``batch`` samples.

    More micro-batches reduce idle time, but each costs more per sample. The numbers are once, twice and four times the
    stages, limited so that a micro-batch has the two samples that a BatchNorm needs.

    >>> micro_batches_worth_trying(64, stages=2), micro_batches_worth_trying(8, stages=2)
    ([2, 4, 8], [2, 4])
    >>> micro_batches_worth_trying(3, stages=4)
    [1]
    """
    most = max(batch // 2, 1)
    return sorted({min(most, stages * factor) for factor in (1, 2, 4)})
