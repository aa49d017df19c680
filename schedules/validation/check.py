"""Checks that a schedule computes one correct training step and cannot deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.action import BACKWARDS, Action, Kind, ScheduleError
from ..core.costs import StageCosts
from ..core.dependencies import dependencies
from ..core.schedule import Schedule
from ..core.stash import stash_peaks
from ..simulation.play import refuse_deadlock
from .versions import Place, check_versions

# The actions of the same stage and micro-batch that each kind needs; those in the second column only if they exist.
_NEEDS: Mapping[Kind, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    Kind.I: ((Kind.F,), (Kind.RECOMPUTE, Kind.RELOAD)),
    Kind.B: ((Kind.F,), (Kind.RECOMPUTE, Kind.RELOAD)),
    Kind.W: ((Kind.I,), ()),
    Kind.RECOMPUTE: ((Kind.F,), ()),
    Kind.OFFLOAD: ((Kind.F,), ()),
    Kind.RELOAD: ((Kind.OFFLOAD,), ()),
}


def check(schedule: Schedule, costs: StageCosts | None = None, memory: Sequence[float] = ()) -> None:
    """Raise ScheduleError unless the schedule computes one correct training step and cannot deadlock.

    Every micro-batch runs forward once and backward once on every stage of one copy of the model, on the device of
    the stage, in an order in which no device waits for ever. If it has recomputes, host copies, gradient reductions or
    optimizer steps, these must be in their places too. Messages are buffered.

    Args:
        schedule: to be checked.
        costs: with `memory`, to check that the stash of each device fits.
        memory: bytes of stash per device.

    Raises:
        ScheduleError: something is wrong; the message names the action and what it conflicts with.
    """
    if len(memory) and costs is None:
        raise ScheduleError(
            "memory= cannot be checked without costs=: give the StageCosts with their stash_bytes"
        )
    _check_shape(schedule)
    place = _check_places(schedule)
    _check_forwards(schedule, place)
    _check_backwards(place)
    _check_order(place)
    _check_overlaps(schedule)
    _check_ends(schedule, place)
    if schedule.versions:
        check_versions(schedule, place)
    graph = dependencies(schedule)
    refuse_deadlock(schedule, graph)
    if costs is not None and len(memory):
        peaks = stash_peaks(graph, costs.for_schedule(schedule))
        _check_memory(schedule, peaks, memory)


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
    if leaf.kind is Kind.OVERLAP_F_B:
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


def _check_backwards(place: Mapping[Action, Place]) -> None:
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
    """Check that each action comes after those of its stage and micro-batch that it needs."""
    for action, here in place.items():
        needed, if_there = _NEEDS.get(action.kind, ((), ()))
        for kind in (*needed, *if_there):
            before = action._replace(kind=kind)
            if before not in place and kind in needed:
                raise ScheduleError(f"{action} at {here} needs {before}, which is missing")
            if before in place and place[before].position >= here.position:
                raise ScheduleError(f"{action} at {here} needs {before}, which comes at {place[before]}")
        if action.kind is Kind.OFFLOAD:
            back, again = (action._replace(kind=kind) for kind in (Kind.RELOAD, Kind.RECOMPUTE))
            if back not in place:
                raise ScheduleError(f"{action} at {here} needs {back}, which is missing")
            if again in place:
                raise ScheduleError(
                    f"{action} at {here} conflicts with {again} at {place[again]}: choose one"
                )


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


def _check_ends(schedule: Schedule, place: Mapping[Action, Place]) -> None:
    """Check that all stages reduce their gradients or none, and step or none, after their last backward."""
    last = {action.stage: (action,) for action in place if action.kind in (Kind.B, Kind.W)}
    for kind in (Kind.REDUCE_GRAD, Kind.OPT_STEP):
        ends = [action for action in place if action.kind is kind]
        if not ends or (kind is Kind.OPT_STEP and schedule.versions):
            continue
        for end in ends:
            if end.micro_batch is not None:
                raise ScheduleError(f"{end} at {place[end]} ends a synchronous step: it names no micro-batch")
        for stage in range(schedule.stages):
            end = Action(kind, stage)
            if end not in place:
                raise ScheduleError(f"{end} is missing, though {ends[0]} at {place[ends[0]]} is there")
            for needed in (*last.get(stage, ()), Action(Kind.REDUCE_GRAD, stage)):
                if needed in place and place[needed] > place[end]:
                    raise ScheduleError(f"{end} at {place[end]} comes before {needed} at {place[needed]}")


def _check_memory(schedule: Schedule, peaks: Sequence[tuple[float, int]], memory: Sequence[float]) -> None:
    if len(memory) != schedule.devices:
        raise ScheduleError(
            f"memory has {len(memory)} numbers for {schedule.devices} devices; give one a device"
        )
    for device, ((peak, position), room) in enumerate(zip(peaks, memory, strict=True)):
        if not peak <= room * (1 + 1e-9):
            action = schedule.leaves[device][position] if schedule.leaves[device] else "nothing"
            raise ScheduleError(
                f"{action} on device {device} raises its stash to {peak:g} bytes, it has room for {room:g}"
            )
