"""Plays a schedule without time, to see whether it comes to an end."""

from __future__ import annotations

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.schedule import Schedule

_MATCHING = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}
_STEP = {Kind.SEND_F: +1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: +1}


def refuse_deadlock(schedule: Schedule) -> None:
    """Raise ScheduleError unless every device can run its list to the end; a send never waits."""
    _Replay(schedule).play()


def refuse_rendezvous_deadlock(schedule: Schedule) -> None:
    """Raise ScheduleError unless every device can run its list with sends that wait for their receives."""
    _Replay(schedule, rendezvous=True).play()


def matching(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    return Action(_MATCHING[action.kind], action.stage + _STEP[action.kind], action.micro_batch)


class _Replay:
    """How far each device has come, and what is done; owned by one call of `play`."""

    def __init__(self, schedule: Schedule, rendezvous: bool = False) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous
        self.position = [0] * schedule.devices
        self.done: set[Action] = set()
        self.messages = any(action.kind in COMMUNICATION for row in schedule.actions for action in row)
        self.forwards: dict[int, list[Action]] = {}
        leaves = (leaf for row in schedule.actions for action in row for leaf in action.leaves)
        for leaf in leaves:
            if leaf.kind is Kind.F and schedule.replicas > 1:
                self.forwards.setdefault(leaf.stage % schedule.model_stages, []).append(leaf)

    def play(self) -> None:
        """Run every device as far as it comes, until all are done or none can move."""
        waiting: dict[Action, list[int]] = {}
        able = list(range(self.schedule.devices))
        while able:
            device = able.pop()
            while (action := self._next(device)) is not None:
                missing = self._missing(action)
                if missing is not None:
                    waiting.setdefault(missing, []).append(device)
                    break
                self.position[device] += 1
                for made in _makes(action):
                    self.done.add(made)
                    able += waiting.pop(made, ())
                if self.rendezvous and action.kind in COMMUNICATION:
                    able += waiting.pop(matching(action), ())
        self._refuse_stuck()

    def _next(self, device: int) -> Action | None:
        row = self.schedule.actions[device]
        return row[self.position[device]] if self.position[device] < len(row) else None

    def _missing(self, action: Action) -> Action | None:
        """The first thing that is not there yet and that the action needs."""
        if self.rendezvous and action.kind in COMMUNICATION:
            other = matching(action)
            here = other in self.done or self._next(self.schedule.device_of[other.stage]) == other
            return None if here else other
        return next(
            (need for leaf in action.leaves for need in self._needs(leaf) if need not in self.done), None
        )

    def _needs(self, leaf: Action) -> list[Action]:
        schedule = self.schedule
        if leaf.kind in (Kind.RECV_F, Kind.RECV_B):
            return [matching(leaf)]
        if leaf.kind is Kind.REDUCE_GRAD:
            forwards = self.forwards.get(leaf.stage % schedule.model_stages, ())
            return [forward._replace(kind=Kind.W) for forward in forwards]
        if leaf.kind is Kind.F:
            return self._message(leaf, schedule.previous_stage(leaf.stage), Kind.F, Kind.RECV_F)
        if leaf.kind in (Kind.I, Kind.B):
            return self._message(leaf, schedule.next_stage(leaf.stage), Kind.I, Kind.RECV_B)
        return []

    def _message(self, leaf: Action, neighbour: int | None, made: Kind, received: Kind) -> list[Action]:
        if neighbour is None:
            return []
        device_of = self.schedule.device_of
        if self.messages and device_of[neighbour] != device_of[leaf.stage]:
            return [leaf._replace(kind=received)]
        return [leaf._replace(kind=made, stage=neighbour)]

    def _refuse_stuck(self) -> None:
        stuck = [
            f"device {device} at {action} for {self._missing(action)}"
            for device in range(self.schedule.devices)
            if (action := self._next(device)) is not None
        ]
        if stuck:
            how = " if a send waits for its receive" if self.rendezvous else ""
            raise ScheduleError(f"deadlock{how}: {'; '.join(stuck)} waits")


def _makes(action: Action) -> list[Action]:
    """What is done once the action is: a full backward is I and W."""
    return [
        made
        for leaf in action.leaves
        for made in (
            (leaf._replace(kind=Kind.I), leaf._replace(kind=Kind.W)) if leaf.kind is Kind.B else (leaf,)
        )
    ]
