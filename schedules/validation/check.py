"""Checks that a schedule computes one correct training step and cannot deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..communication.insert_messages import as_written, has_messages
from ..communication.lowering import Pairs, lower, without_messages
from ..communication.rendezvous import Queues, refuse_rendezvous_deadlock
from ..core.action import BACKWARDS, HOST_COPIES, Action, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import EARLIER, dependencies
from ..core.schedule import Schedule
from ..simulation.deadlock import refuse_deadlock
from ..simulation.memory import stash_peaks
from .messages import check_messages
from .optimizer_steps import Place, check_steps, last_backwards


def check(
    schedule: Schedule,
    costs: StageCosts | None = None,
    memory: Sequence[float] = (),
    rendezvous: bool | Queues | None = None,
    skips: Pairs = (),
    shared: Pairs = (),
    rank_of: Sequence[int] = (),
) -> None:
    """Raise ScheduleError unless the schedule computes one correct training step and cannot deadlock.

    Every micro-batch runs forward once and backward once on every stage of one copy of the model, on the device of
    the stage, in an order in which no device waits for ever. If it has sends and receives, recomputes, host copies,
    gradient reductions or optimizer steps, these must be in their places too.

    Args:
        schedule: to be checked.
        costs: with `memory`, to check that the stash of each device fits.
        memory: bytes of stash per device.
        rendezvous: True to show that no message can wait for ever where none is buffered, as with NCCL: each rank
            issues its sends and receives in one queue and goes on; a message is done when it is the next one in the
            queues of both ranks. The messages are those of the schedule, or else those of `message_order`. With more
            queues there is no deadlock then either; "pair" and "edge" check with a queue for each other rank, and for
            each other rank and direction. False: sends are buffered, and a receive waits for its message. Left out,
            True if the schedule has messages, or any of the following is given.
        skips, shared, rank_of: as for `message_order`; for a schedule that has no messages.

    Raises:
        ScheduleError: something is wrong; the message names the action and what it conflicts with.
    """
    queues = _queues(schedule, rendezvous, any(map(len, (skips, shared, rank_of))))
    if len(memory) and costs is None:
        raise ScheduleError(
            "memory= cannot be checked without costs=: give the StageCosts with their stash_bytes"
        )
    _check_shape(schedule)
    place = _check_places(schedule)
    _check_forwards(schedule, place)
    _check_backwards(schedule, place)
    _check_order(place)
    _check_overlaps(schedule)
    _check_recomputes(place)
    _check_host_copies(place)
    _check_reductions(schedule, place)
    check_steps(schedule, place)
    written = has_messages(schedule)
    if written:
        check_messages(schedule)
    refuse_deadlock(without_messages(schedule) if queues else schedule)
    if queues:
        lowering = as_written(schedule) if written else lower(schedule, skips, shared, rank_of)
        refuse_rendezvous_deadlock(lowering, queues)
    if costs is not None and len(memory):
        _check_memory(schedule, costs, memory)


def _queues(schedule: Schedule, rendezvous: bool | Queues | None, is_lowered: bool) -> Queues | None:
    """Return which queues of messages to check, if any."""
    if rendezvous not in (None, False, True, "rank", "pair", "edge"):
        raise ScheduleError(f'rendezvous is True, False, "rank", "pair" or "edge", got {rendezvous!r}')
    written = has_messages(schedule)
    if written and is_lowered:
        raise ScheduleError(
            f"{schedule.name} has sends and receives of its own: skips=, shared= and rank_of= are for a schedule "
            "without them"
        )
    if rendezvous is None:
        rendezvous = written or is_lowered
    return "rank" if rendezvous is True else rendezvous or None


def _check_shape(schedule: Schedule) -> None:
    """Check that the numbers of devices, stages and micro-batches fit together."""
    if schedule.devices < 1 or schedule.stages < 1 or schedule.micro_batches < 1:
        raise ScheduleError(
            f"{schedule.name} has {schedule.devices} devices, {schedule.stages} stages, "
            f"{schedule.micro_batches} micro-batches; there must be one of each"
        )
    if schedule.replicas < 1 or schedule.stages % schedule.replicas:
        raise ScheduleError(f"{schedule.stages} stages are not {schedule.replicas} copies of a model")
    for stage, device in enumerate(schedule.device_of):
        if not 0 <= device < schedule.devices:
            raise ScheduleError(f"stage {stage} is placed on device {device} of {schedule.devices}")


def _check_places(schedule: Schedule) -> Mapping[Action, Place]:
    """Check that each action exists once, in range, on the device of its stage; return where each stands."""
    place: dict[Action, Place] = {}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            for leaf in action.leaves:
                here = Place(device, position)
                _check_place(schedule, leaf, here)
                if leaf in place:
                    raise ScheduleError(f"{leaf} stands twice: at {place[leaf]} and at {here}")
                place[leaf] = here
    return place


def _check_place(schedule: Schedule, leaf: Action, here: Place) -> None:
    if leaf.parts or (leaf.kind is Kind.OVERLAP_F_B):
        raise ScheduleError(
            f"{leaf} at {here} must be one forward and one backward, not overlapped themselves"
        )
    if not 0 <= leaf.stage < schedule.stages:
        raise ScheduleError(f"{leaf} at {here}: there is no stage {leaf.stage} among {schedule.stages}")
    if leaf.micro_batch is None and leaf.kind not in (Kind.REDUCE_GRAD, Kind.OPT_STEP):
        raise ScheduleError(f"{leaf} at {here} names no micro-batch")
    if leaf.micro_batch is not None and leaf.kind is Kind.REDUCE_GRAD:
        raise ScheduleError(f"{leaf} at {here}: gradients are reduced once, for all micro-batches")
    if leaf.micro_batch is not None and not 0 <= leaf.micro_batch < schedule.micro_batches:
        raise ScheduleError(
            f"{leaf} at {here}: there is no micro-batch {leaf.micro_batch} among {schedule.micro_batches}"
        )
    home = schedule.device_of[leaf.stage]
    if home != here.device:
        raise ScheduleError(f"{leaf} stands at {here}, but stage {leaf.stage} is on device {home}")


def _check_forwards(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Check that each micro-batch runs forward once on every stage of exactly one copy of the model."""
    for micro_batch in range(schedule.micro_batches):
        there = [stage for stage in range(schedule.stages) if Action(Kind.F, stage, micro_batch) in place]
        if not there:
            raise ScheduleError(
                f"micro-batch {micro_batch} has no forward: {Action(Kind.F, 0, micro_batch)} is missing"
            )
        first = there[0] - there[0] % schedule.model_stages
        for stage in range(first, first + schedule.model_stages):
            if stage not in there:
                missing = Action(Kind.F, stage, micro_batch)
                raise ScheduleError(
                    f"{missing} is missing, though {Action(Kind.F, there[0], micro_batch)} is there"
                )
        if there[-1] >= first + schedule.model_stages:
            raise ScheduleError(
                f"{Action(Kind.F, there[-1], micro_batch)} repeats {Action(Kind.F, there[0], micro_batch)} "
                "in another copy of the model; a micro-batch runs through one"
            )


def _check_backwards(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Check that each forward has exactly one B, or one I and one W, and that no backward lacks its forward."""
    for action, here in place.items():
        if action.kind in BACKWARDS and action._replace(kind=Kind.F) not in place:
            raise ScheduleError(f"{action} at {here} has no forward {action._replace(kind=Kind.F)}")
        if action.kind is not Kind.F:
            continue
        full, inputs, weights = (action._replace(kind=kind) for kind in (Kind.B, Kind.I, Kind.W))
        split = [backward for backward in (inputs, weights) if backward in place]
        if full in place and split:
            raise ScheduleError(
                f"{full} at {place[full]} conflicts with {split[0]} at {place[split[0]]}: B is I and W"
            )
        if full not in place and len(split) < 2:
            missing = (
                f"{weights} is"
                if inputs in place
                else f"{inputs} is"
                if weights in place
                else f"{full} or {inputs} and {weights} are"
            )
            raise ScheduleError(f"{action} at {here} has no full backward: {missing} missing")


def _check_order(place: Mapping[Action, Place]) -> None:
    """Check that F precedes I or B, and I precedes W, on every stage."""
    for action, here in place.items():
        if action.kind not in BACKWARDS:
            continue
        before = action._replace(kind=EARLIER[action.kind])
        if place[before].position >= here.position:
            raise ScheduleError(f"{action} at {here} needs {before}, which comes at {place[before]}")


def _check_overlaps(schedule: Schedule) -> None:
    """Check that each overlapped pair is a forward and a backward of different micro-batches."""
    for row in schedule.actions:
        for action in row:
            if not action.parts:
                continue
            if (
                len(action.parts) != 2
                or action.parts[0].kind is not Kind.F
                or action.parts[1].kind not in BACKWARDS
            ):
                raise ScheduleError(f"{action} must overlap one forward with one backward")
            forward, backward = action.parts
            if forward.micro_batch == backward.micro_batch:
                raise ScheduleError(f"{action}: {backward} needs {forward}, they cannot run side by side")


def _check_recomputes(place: Mapping[Action, Place]) -> None:
    """Check that each recompute stands between the forward and the backward of its micro-batch."""
    for action, here in place.items():
        if action.kind is not Kind.RECOMPUTE:
            continue
        forward = action._replace(kind=Kind.F)
        backward = next(
            (b for kind in (Kind.B, Kind.I) if (b := action._replace(kind=kind)) in place),
            action._replace(kind=Kind.B),
        )
        if forward not in place or place[forward] >= here:
            raise ScheduleError(f"{action} at {here} repeats {forward}, which has not run by then")
        if backward not in place or place[backward] <= here:
            raise ScheduleError(f"{action} at {here} comes too late for {backward}")


def _check_host_copies(place: Mapping[Action, Place]) -> None:
    """Check that F, OFFLOAD, RELOAD and the backward of an offloaded micro-batch stand in this order."""
    for action, here in place.items():
        if action.kind not in HOST_COPIES:
            continue
        out, back = (action._replace(kind=kind) for kind in (Kind.OFFLOAD, Kind.RELOAD))
        again = action._replace(kind=Kind.RECOMPUTE)
        if again in place:
            raise ScheduleError(f"{action} at {here} conflicts with {again} at {place[again]}: choose one")
        backward = next(b for kind in (Kind.B, Kind.I) if (b := action._replace(kind=kind)) in place)
        order = [action._replace(kind=Kind.F), out, back, backward]
        for earlier, later in pairwise(order):
            for one in (earlier, later):
                if one not in place:
                    raise ScheduleError(f"{action} at {here} needs {one}, which is missing")
            if place[earlier].position >= place[later].position:
                raise ScheduleError(
                    f"{later} at {place[later]} needs {earlier}, which comes at {place[earlier]}"
                )


def _check_reductions(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Check that all stages reduce their gradients or none, each after its last backward."""
    reductions = [action for action in place if action.kind is Kind.REDUCE_GRAD]
    if not reductions:
        return
    last = last_backwards(place)
    for stage in range(schedule.stages):
        reduction = Action(Kind.REDUCE_GRAD, stage)
        if reduction not in place:
            raise ScheduleError(
                f"{reduction} is missing, though {reductions[0]} at {place[reductions[0]]} is there"
            )
        if stage in last and place[last[stage]] > place[reduction]:
            raise ScheduleError(
                f"{reduction} at {place[reduction]} comes before {last[stage]} at {place[last[stage]]}"
            )


def _check_memory(schedule: Schedule, costs: StageCosts, memory: Sequence[float]) -> None:
    if len(memory) != schedule.devices:
        raise ScheduleError(
            f"memory has {len(memory)} numbers for {schedule.devices} devices; give one a device"
        )
    peaks = stash_peaks(schedule, costs.for_schedule(schedule), dependencies(schedule))
    for device, ((peak, position), room) in enumerate(zip(peaks, memory, strict=True)):
        if not peak <= room * (1 + 1e-9):
            action = schedule.actions[device][position] if schedule.actions[device] else "nothing"
            raise ScheduleError(
                f"{action} on device {device} raises its stash to {peak:g} bytes, it has room for {room:g}"
            )
