"""Passes: each takes a schedule and returns it with something taken apart, put together or added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from ..core.action import Action, Kind, ScheduleError
from ..core.schedule import Schedule

_Row = Sequence[Action]


def split_overlaps(schedule: Schedule) -> Schedule:
    """Return the schedule with each overlapped pair as a forward and then a backward."""
    if not any(action.parts for row in schedule.actions for action in row):
        return schedule
    return _each_row(schedule, lambda row: [leaf for action in row for leaf in action.leaves])


def split_backward(schedule: Schedule, only: Iterable[Action] | None = None) -> Schedule:
    """Return the schedule with each full backward as I and then W; overlapped pairs come apart too.

    only: the full backwards to split; left out, all of them.

    Raises ScheduleError when one of these is no full backward of the schedule.
    """
    apart = split_overlaps(schedule)
    full = {action for row in apart.actions for action in row if action.kind is Kind.B}
    chosen = full if only is None else set(only)
    if chosen - full:
        raise ScheduleError(f"{schedule.name} has no full backward {min(map(str, chosen - full))} to split")
    halves = {action: _halves(action) for action in chosen}
    return _each_row(apart, lambda row: [half for action in row for half in halves.get(action, (action,))])


def fuse_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each I that is followed at once by its W as a full backward.

    A full backward is usually cheaper than its halves, but passes its gradient on later.
    """
    return _each_row(schedule, _fused)


def insert_recompute(
    schedule: Schedule, stages: Iterable[int] | None = None, micro_batches: Iterable[int] | None = None
) -> Schedule:
    """Return the schedule with a RECOMPUTE before each backward of these stages and micro-batches, all by default.

    Recomputes that are there already stay as they are; overlapped pairs with such a backward come apart.

    Raises ScheduleError when there is no such stage.
    """
    chosen = set(range(schedule.stages)) if stages is None else set(stages)
    for stage in chosen:
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"{schedule.name} has no stage {stage} to recompute among {schedule.stages}")
    parts = set(range(schedule.micro_batches)) if micro_batches is None else set(micro_batches)
    there = {action for row in schedule.actions for action in row if action.kind is Kind.RECOMPUTE}

    def row_with(row: _Row) -> Iterator[Action]:
        for leaf in (leaf for action in row for leaf in _apart(action, chosen)):
            recompute = Action(Kind.RECOMPUTE, leaf.stage, leaf.micro_batch)
            wanted = leaf.stage in chosen and leaf.micro_batch in parts
            if leaf.kind in (Kind.B, Kind.I) and wanted and recompute not in there:
                yield recompute
            yield leaf

    return _each_row(schedule, row_with)


def insert_reduce_grad(schedule: Schedule) -> Schedule:
    """Return the schedule with a REDUCE_GRAD after the last backward of each stage.

    Where the model has several copies they wait for each other, and the reductions stand at the end of each
    device, in the order of the model. A schedule that has reductions comes back as it is.
    """
    if any(action.kind is Kind.REDUCE_GRAD for row in schedule.actions for action in row):
        return schedule
    if schedule.replicas == 1:
        return _each_row(schedule, _with_reductions)
    rows = []
    for device, row in enumerate(schedule.actions):
        stages = sorted(schedule.stages_of(device), key=lambda stage: stage % schedule.model_stages)
        rows.append((*row, *(Action(Kind.REDUCE_GRAD, stage) for stage in stages)))
    return replace(schedule, actions=tuple(rows))


def insert_optimizer_step(schedule: Schedule) -> Schedule:
    """Return the schedule with an OPT_STEP for each stage as soon as all its gradients are there.

    That is after its last backward, and after its REDUCE_GRAD where it has one. A stage that has an OPT_STEP keeps it.

    Raises ScheduleError for an asynchronous schedule, which steps by itself.
    """
    if schedule.versions:
        raise ScheduleError(f"{schedule.name} is asynchronous: it has its optimizer steps where they belong")
    return _each_row(schedule, _with_steps)


def permute_devices(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return the schedule with what device d does moved to device order[d].

    Raises ScheduleError when order is no permutation of the devices.
    """
    if sorted(order) != list(range(schedule.devices)):
        raise ScheduleError(f"{tuple(order)} is no permutation of the devices 0 to {schedule.devices - 1}")
    came_from = sorted(range(schedule.devices), key=order.__getitem__)
    rows = tuple(schedule.actions[device] for device in came_from)
    return replace(schedule, actions=rows, device_of=tuple(order[device] for device in schedule.device_of))


def _each_row(schedule: Schedule, change: Callable[[_Row], Iterable[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(change(row)) for row in schedule.actions))


def _halves(action: Action) -> tuple[Action, ...]:
    return action._replace(kind=Kind.I), action._replace(kind=Kind.W)


def _fused(row: _Row) -> Iterator[Action]:
    actions = iter(row)
    held = next(actions, None)
    while held is not None:
        following = next(actions, None)
        if held.kind is Kind.I and following == held._replace(kind=Kind.W):
            held, following = held._replace(kind=Kind.B), next(actions, None)
        yield held
        held = following


def _with_reductions(row: _Row) -> Iterator[Action]:
    return _after_last(row, (Kind.B, Kind.W), Kind.REDUCE_GRAD)


def _with_steps(row: _Row) -> Iterator[Action]:
    there = {action.stage for action in row if action.kind is Kind.OPT_STEP}
    return _after_last(row, (Kind.B, Kind.W, Kind.REDUCE_GRAD), Kind.OPT_STEP, there)


def _after_last(
    row: _Row, kinds: tuple[Kind, ...], added: Kind, but: Collection[int] = ()
) -> Iterator[Action]:
    """The row with an action for each stage, but for some, behind the last one of some kinds."""
    last = {leaf.stage: action for action in row for leaf in action.leaves if leaf.kind in kinds}
    for action in row:
        yield action
        for leaf in action.leaves:
            if leaf.kind in kinds and last[leaf.stage] is action and leaf.stage not in but:
                yield Action(added, leaf.stage)


def _apart(action: Action, stages: set[int]) -> tuple[Action, ...]:
    """The leaves of an overlapped pair whose backward is on one of the stages; else the action itself."""
    if action.parts and action.parts[1].stage in stages:
        return action.parts
    return (action,)
