"""Makes the plan: for each schedule and number of micro-batches the best cut, and of these the fastest step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

from ..cluster import Cluster
from ..profiling import Profile
from .branched import plan_branched
from .constraints import read_constraints
from .costs.stage_memory import MODES, RecomputeChoice
from .feasibility.infeasible import InfeasiblePlanError
from .feasibility.suggestions import suggestions, suggestions_text
from .plan_document import Plan
from .search.candidate import ASYNCHRONOUS, CHUNKS
from .search.order_text import SEARCH
from .search.strategies import Request, infeasible_candidates, search


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "auto",
    micro_batches: int | Literal["auto"] = "auto",
    recompute: RecomputeChoice = "auto",
    stages: int | Literal["auto"] | None = None,
    chunks: int | None = None,
    replicas: int | Literal["auto"] = 1,
    max_micro_batches: int | None = None,
    pin: Mapping[str, int] | None = None,
    colocate: Sequence[Collection[str]] = (),
    no_cut_before: Collection[str] = (),
    cut_before: Sequence[str] | None = None,
    allow_split_ties: bool = False,
) -> Plan:
    """The cut of a profiled chain over the devices of a cluster whose step is predicted to be the shortest.

    For each schedule and number of micro-batches that is asked for, the cut has the smallest bottleneck that any
    cut has whose stages fit their devices, in whatever order these are used; the memory of a stage counts its stash as
    often as that schedule has micro-batches in flight there. Of these plans the one with the shortest simulated step is
    returned, and of those that are equal the one that needs the least memory. The others are in its ``alternatives``.

    With few micro-batches a cut with a larger bottleneck may have a shorter step. Where the schedule is left to search,
    such cuts are looked at, too: all of them where they are few, else those near the best.

    With several stages a device (``interleaved-1f1b``, ``zb-v`` and their like) the largest sum of a device is
    smallest; that is exact where there are few cuts, else the best that a local search finds.

    Args:
        profile: measured costs of the layers.
        cluster: the devices; of orders that are equally good its own is taken.
        schedule: a name, ``"auto"`` to take the best, or ``"search"`` for an order of actions that is searched for
            the stages that are best under the others.
        micro_batches: a number that was profiled, or ``"auto"`` to take the best of those.
        recompute: ``"auto"`` lets a stage run its forward again where its memory does not do else; ``"never"``,
            ``"except-last"`` (all micro-batches but the last) and ``"always"`` say it for all stages.
        stages: how many; None for one a device (or ``chunks`` of them), or fewer where only fewer fit; ``"auto"`` for
            the best number.
        chunks: stages of each device, for a schedule that has several; None for its own number.
        replicas: copies of the model that train side by side, each on devices of its own with a part of the
            micro-batches; their gradients are summed. ``"auto"`` for the best of the numbers that leave no device over.
            A model whose forward writes buffers, as a BatchNorm does in training, can have one copy only.
        max_micro_batches: of the numbers that were profiled, only those up to this one.
        pin: the stage that a layer has to be in, by its name.
        colocate: groups of layers that stay in one stage.
        no_cut_before: layers that no stage begins with.
        cut_before: the layers that stages begin with, the first stage left out: the whole cut.
        allow_split_ties: allow layers that share a parameter to be in different stages if no cut into as many stages
            keeps them together. The later stages then hold a copy of the parameter and of its gradient.

    Raises:
        ValueError: an unknown schedule or layer, more stages than layers or devices, micro-batches below 1 or not
            profiled, or constraints that contradict each other.
        InfeasiblePlanError: no cut fits; it names the stage, the missing bytes and changes that fit.
    """
    if profile.edges:
        return plan_branched(
            profile,
            cluster,
            partial(
                plan,
                cluster=cluster,
                schedule=schedule,
                micro_batches=micro_batches,
                recompute=recompute,
                stages=stages,
                chunks=chunks,
                replicas=replicas,
                max_micro_batches=max_micro_batches,
                pin=pin,
                colocate=colocate,
                no_cut_before=no_cut_before,
                cut_before=cut_before,
                allow_split_ties=allow_split_ties,
            ),
            colocate,
            allow_split_ties,
        )
    constraints = read_constraints(profile, pin, colocate, no_cut_before, cut_before)
    copies = check_choices(schedule, len(cluster), chunks=chunks, recompute=recompute, replicas=replicas)
    if stages is None and constraints.stages is not None:
        stages = constraints.stages
    if stages is None:
        check_devices(len(cluster), len(profile.layers), copies[-1])
    _check_stages(stages, len(cluster) // copies[0], len(profile.layers), chunks or CHUNKS.get(schedule) or 1)
    request = Request(
        profile=profile,
        cluster=cluster,
        schedule=schedule,
        micro_batches=tuple(_micro_batches(profile, micro_batches, max_micro_batches)),
        recompute=recompute,
        stages=stages,
        chunks=chunks,
        constraints=constraints,
        replicas=copies,
        allow_split_ties=allow_split_ties,
    )
    found = search(request)
    if found is not None:
        return found
    worst = min(
        infeasible_candidates(request),
        key=lambda infeasible: infeasible.deficit_bytes or math.inf,
        default=None,
    )
    if worst is None:
        raise ValueError(
            f"schedule {schedule!r} has no {stages} stages on any number of the {len(cluster)} devices"
        )
    ways = suggestions(request)
    raise InfeasiblePlanError(
        f"the model does not fit: {worst.text}. {suggestions_text(ways)}",
        worst.stage,
        worst.deficit_bytes,
        ways,
    )


def check_devices(devices: int, layers: int, copies: int = 1) -> None:
    """Refuses more devices for a copy of the model than it has layers, where there is to be a stage for each.

    Raises:
        ValueError: there are.
    """
    if devices // copies > layers:
        each = " for each copy of the model" if copies > 1 else ""
        raise ValueError(
            f"{devices // copies} devices{each} need as many stages, the model has {layers} layers: "
            f"use at most {layers * copies} devices"
        )


def micro_batches_worth_trying(batch: int, stages: int) -> list[int]:
    """Numbers of micro-batches to measure for a mini-batch of ``batch`` samples: more idle less, but cost more each.

    As many as stages, twice and four times that; where there are enough samples each part has two at least, as a
    BatchNorm needs.

    >>> micro_batches_worth_trying(64, stages=2), micro_batches_worth_trying(8, stages=2)
    ([2, 4, 8], [2, 4])
    """
    most = max(batch // 2, min(batch, stages))
    return sorted({min(most, stages * factor) for factor in (1, 2, 4)})


def check_choices(
    schedule: str,
    devices: int,
    *,
    chunks: int | None = None,
    recompute: str = "auto",
    replicas: int | Literal["auto"] = 1,
) -> tuple[int, ...]:
    """Check the arguments of :func:`plan` that need no profile, so that mistakes show before anything is measured.

    Returns:
        The numbers of replicas to try.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """
    if recompute not in MODES:
        raise ValueError(f"recompute must be one of {', '.join(map(repr, MODES))}, got {recompute!r}")
    _check_schedule(schedule, chunks)
    return _replicas(replicas, devices)


def _check_schedule(schedule: str, chunks: int | None) -> None:
    known = (*CHUNKS, *ASYNCHRONOUS)
    if schedule not in ("auto", SEARCH, *known):
        raise ValueError(
            f"no plan is made for schedule {schedule!r}: choose one of {', '.join(known)}, {SEARCH!r} or 'auto'"
        )
    if chunks is None:
        return
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks!r}")
    if chunks > 1 and CHUNKS.get(schedule, None if schedule in ASYNCHRONOUS else 2) is None:
        several = ", ".join(name for name, count in CHUNKS.items() if count)
        raise ValueError(
            f"schedule {schedule!r} has one stage a device, got chunks={chunks}: schedules with several are {several}"
        )


def _check_stages(stages: int | Literal["auto"] | None, devices: int, layers: int, chunks: int) -> None:
    if stages is None or stages == "auto":
        return
    most = min(devices * chunks, layers)
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= most:
        raise ValueError(
            f"stages must be between 1 and {most} ({devices} devices, {layers} layers), got {stages!r}"
        )


def _replicas(replicas: int | Literal["auto"], devices: int) -> tuple[int, ...]:
    if replicas == "auto":
        return tuple(count for count in range(1, devices + 1) if devices % count == 0)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= devices:
        raise ValueError(
            f"replicas must be between 1 and the number of devices, {devices}, or 'auto', got {replicas!r}"
        )
    return (replicas,)


def _micro_batches(profile: Profile, micro_batches: int | Literal["auto"], most: int | None) -> Sequence[int]:
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f"max_micro_batches must be at least 1, got {most!r}")
    if micro_batches == "auto":
        measured = [costs.micro_batches for costs in profile.costs]
        counts = [count for count in measured if most is None or count <= most]
        if not counts:
            raise ValueError(f"max_micro_batches is {most}, and the profile was measured for {measured}")
        return counts
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1 or 'auto', got {micro_batches!r}")
    if most is not None and micro_batches > most:
        raise ValueError(f"micro_batches is {micro_batches}, and max_micro_batches {most}")
    return [profile.at(micro_batches).micro_batches]
