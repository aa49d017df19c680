"""Passes that split, fuse or insert actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from ..core.action import Action, Kind, ScheduleError
from ..core.schedule import Schedule

_Row = Sequence[Action]
# Between a forward and a backward that are nearer, the copy out and the copy back leave nothing.
_LEAST_APART = 4


def split_overlaps(schedule: Schedule) -> Schedule:
    """Return the schedule with each overlapped pair split into a forward and then a backward."""
    return schedule if schedule.leaves is schedule.actions else replace(schedule, actions=schedule.leaves)


def split_backward(schedule: Schedule, only: Iterable[Action] | None = None) -> Schedule:
    """Return the schedule with each full backward split into I and then W; overlapped pairs are split first.

    Args:
        schedule: to be changed.
        only: the full backwards to split; left out, all of them.

    Raises:
        ScheduleError: one of these is no full backward of the schedule.
    """
    apart = split_overlaps(schedule)
    full = {action for row in apart.actions for action in row if action.kind is Kind.B}
    chosen = full if only is None else set(only)
    if chosen - full:
        raise ScheduleError(f"{schedule.name} has no full backward {min(map(str, chosen - full))} to split")
    halves = {action: _halves(action) for action in chosen}
    return _each_row(apart, lambda row: [half for action in row for half in halves.get(action, (action,))])


def fuse_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each I and the W directly after it fused into a full backward.

    A full backward is usually cheaper than its halves, but passes its gradient on later.
    """
    return _each_row(schedule, _fused)


def insert_recompute(
    schedule: Schedule, stages: Iterable[int] | None = None, micro_batches: Iterable[int] | None = None
) -> Schedule:
    """Return the schedule with a RECOMPUTE before each backward of these stages and micro-batches.

    Recomputes that exist stay as they are; overlapped pairs are split first.

    Args:
        schedule: to be changed.
        stages: all of them by default.
        micro_batches: all of them by default.

    Raises:
        ScheduleError: there is no such stage.
    """
    chosen = _chosen(schedule, stages, "recompute")
    parts = set(range(schedule.micro_batches)) if micro_batches is None else set(micro_batches)
    there = {action for row in schedule.actions for action in row if action.kind is Kind.RECOMPUTE}

    def row_with(row: _Row) -> Iterator[Action]:
        for action in row:
            recompute = Action(Kind.RECOMPUTE, action.stage, action.micro_batch)
            wanted = action.stage in chosen and action.micro_batch in parts
            if action.kind in (Kind.B, Kind.I) and wanted and recompute not in there:
                yield recompute
            yield action

    return _each_row(split_overlaps(schedule), row_with)


def insert_offload(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Return the schedule with an OFFLOAD and a RELOAD for each micro-batch of these stages that saves memory by it.

    Each copy runs beside one action of the device: the copy out beside the action that follows the forward, and the
    copy back beside the action that precedes the backward::

        F(s, k)   next action   OFFLOAD(s, k)   ...   RELOAD(s, k)   action before   B(s, k)
                  ▒ copy out ▒                                       ▒ copy back ▒

    A micro-batch whose backward follows too soon keeps its stash, as does one that is recomputed. Actions that exist
    stay as they are; overlapped pairs are split first.

    Args:
        schedule: to be changed.
        stages: all of them by default.

    Raises:
        ScheduleError: there is no such stage.
    """
    chosen = _chosen(schedule, stages, "offload")
    return _each_row(split_overlaps(schedule), lambda row: _with_offloads(row, chosen))


def insert_reduce_grad(schedule: Schedule) -> Schedule:
    """Return the schedule with a REDUCE_GRAD after the last backward of each stage.

    With several copies of the model, the reductions stand at the end of each device, in the order of the model, and
    wait for each other. A schedule that has reductions comes back unchanged.
    """
    if any(action.kind is Kind.REDUCE_GRAD for row in schedule.actions for action in row):
        return schedule
    if schedule.replicas == 1:
        return _each_row(schedule, _with_reductions)
    reductions: list[list[int]] = [[] for _ in schedule.actions]
    for stage in sorted(range(schedule.stages), key=lambda stage: stage % schedule.model_stages):
        reductions[schedule.device_of[stage]].append(stage)
    rows = [
        (*row, *(Action(Kind.REDUCE_GRAD, stage) for stage in stages))
        for row, stages in zip(schedule.actions, reductions, strict=True)
    ]
    return replace(schedule, actions=tuple(rows))


def insert_optimizer_step(schedule: Schedule) -> Schedule:
    """Return the schedule with an OPT_STEP for each stage as soon as all its gradients are complete.

    It follows the stage's last backward, and its REDUCE_GRAD if it has one. A stage that has an OPT_STEP keeps it.

    Raises:
        ScheduleError: the schedule is asynchronous and has its own optimizer steps.
    """
    if schedule.versions:
        raise ScheduleError(f"{schedule.name} is asynchronous: it has its optimizer steps where they belong")
    return _each_row(schedule, _with_steps)


def permute_devices(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return the schedule with the work of device d moved to device order[d].

    Raises:
        ScheduleError: `order` is no permutation of the devices.
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
    current = next(actions, None)
    while current is not None:
        following = next(actions, None)
        if current.kind is Kind.I and following == current._replace(kind=Kind.W):
            current, following = current._replace(kind=Kind.B), next(actions, None)
        yield current
        current = following


def _with_reductions(row: _Row) -> Iterator[Action]:
    return _after_last(row, (Kind.B, Kind.W), Kind.REDUCE_GRAD)


def _with_steps(row: _Row) -> Iterator[Action]:
    there = {action.stage for action in row if action.kind is Kind.OPT_STEP}
    return _after_last(row, (Kind.B, Kind.W, Kind.REDUCE_GRAD), Kind.OPT_STEP, there)


def _after_last(
    row: _Row, kinds: tuple[Kind, ...], added: Kind, but: Collection[int] = ()
) -> Iterator[Action]:
    """Yield the row with an action added for each stage, except some, after its last action of some kinds."""
    last = {leaf.stage: action for action in row for leaf in action.leaves if leaf.kind in kinds}
    for action in row:
        yield action
        for leaf in action.leaves:
            if leaf.kind in kinds and last[leaf.stage] is action and leaf.stage not in but:
                yield Action(added, leaf.stage)


def _with_offloads(row: _Row, stages: Collection[int]) -> Iterator[Action]:
    """Yield the row with the copies of some stages, each a whole action away from what it belongs to."""
    turn = {action: number for number, action in enumerate(row)}
    kept = {action[1:3] for action in row if action.kind in (Kind.RECOMPUTE, Kind.OFFLOAD)}
    offloads: dict[int, list[Action]] = defaultdict(list)  # by the turn that they stand before
    reloads: dict[int, list[Action]] = defaultdict(list)
    for backward, last in turn.items():
        first = turn.get(backward._replace(kind=Kind.F))
        if backward.kind not in (Kind.B, Kind.I) or first is None or last - first < _LEAST_APART:
            continue
        if backward.stage in stages and backward[1:3] not in kept:
            offloads[first + 2].append(backward._replace(kind=Kind.OFFLOAD))
            reloads[last - 1].append(backward._replace(kind=Kind.RELOAD))
    for action in row:
        number = turn.get(action, -1)
        yield from offloads.get(number, ())
        yield from reloads.get(number, ())
        yield action


def _chosen(schedule: Schedule, stages: Iterable[int] | None, what: str) -> set[int]:
    """Return the stages to change, all of them by default; raise ScheduleError if one does not exist."""
    chosen = set(range(schedule.stages)) if stages is None else set(stages)
    for stage in chosen:
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"{schedule.name} has no stage {stage} to {what} among {schedule.stages}")
    return chosen
