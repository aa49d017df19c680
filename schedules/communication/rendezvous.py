"""Checks that a message order cannot deadlock if sends are not buffered; an error names the cycle of waits.

A rank issues its messages into queues, each in a fixed order. A device that comes to a message issues it and goes on;
it waits only at an action that needs a message which is not done. A message is done when it has been issued on all its
ranks and is the first in the queue of each: nothing is buffered.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Literal

from ..core.action import BACKWARDS, Action, Kind, ScheduleError
from ..core.message import Message
from ..core.schedule import Schedule
from .lowering import Lowering

Queues = Literal["rank", "pair", "edge"]

_QUEUE_OF: dict[Queues, Callable[[Message], Hashable]] = {
    "rank": lambda message: None,
    "pair": lambda message: tuple(sorted(message.ranks)),
    "edge": lambda message: message.ranks,
}
_SAID = {"rank": "a rank", "pair": "a pair of ranks", "edge": "a directed edge"}


def refuse_rendezvous_deadlock(lowering: Lowering, queues: Queues) -> None:
    """Raise ScheduleError, with the cycle of waits, if the messages deadlock when sends are not buffered.

    Args:
        lowering: the actions and messages. Its schedule must be free of deadlocks with buffered sends.
        queues: the queues of a rank: one for all its messages ("rank"), one per peer ("pair"), or one per peer
            and direction ("edge"). Collectives have queues of their own, except with "rank".
    """
    _Play(lowering, queues).run()


class _Play:
    """The state of all devices and queues; owned by one call of `refuse_rendezvous_deadlock`.

    Attributes:
        position: of each device, the next item of its row.
        missing: of each rank's end of a message, how many of the rank's devices have not issued it.
        done: the messages and actions that are done.
        waiting: the devices that wait for a message or an action.
    """

    def __init__(self, lowering: Lowering, queues: Queues) -> None:
        self.rows, self.rank_of, self.queues = lowering.rows, lowering.rank_of, queues
        self.device_of = lowering.schedule.device_of
        self.needs = _needs(lowering)
        self.position = [0] * len(self.rows)
        self.missing = Counter(
            (item, rank)
            for row, rank in zip(self.rows, self.rank_of, strict=True)
            for item in row
            if isinstance(item, Message)
        )
        self.done: set[Action | Message] = set()
        self.waiting: defaultdict[Action | Message, list[int]] = defaultdict(list)
        self.queue_of = _QUEUE_OF[queues]
        self.queue: defaultdict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)
        for rank, order in enumerate(lowering.orders):
            for message in order:
                self.queue[rank, self.queue_of(message)].append(message)

    def run(self) -> None:
        able = list(range(len(self.rows) - 1, -1, -1))
        while able:
            self._advance(able.pop(), able)
        stuck = [device for device, row in enumerate(self.rows) if self.position[device] < len(row)]
        if stuck:
            raise ScheduleError(
                f"deadlock of unbuffered messages with a queue for {_SAID[self.queues]}: {self._cycle(stuck[0])}"
            )

    def _advance(self, device: int, able: list[int]) -> None:
        """Run a device as far as it comes; add to `able` those that can go on then."""
        row = self.rows[device]
        while self.position[device] < len(row):
            item = row[self.position[device]]
            if isinstance(item, Message):
                self.missing[item, self.rank_of[device]] -= 1
                self._meet(item, able)
            else:
                awaited = self._awaited(item)
                if awaited is not None:
                    self.waiting[awaited].append(device)
                    return
                self._finish(item, able)
            self.position[device] += 1

    def _awaited(self, action: Action) -> Action | Message | None:
        """Return what an action waits for, if anything."""
        for leaf in action.leaves:
            for need in self.needs.get(leaf, ()):
                if need not in self.done:
                    return need
        return None

    def _meet(self, message: Message | None, able: list[int]) -> None:
        """Finish a message if it can be, and those that it was in the way of."""
        candidates = [message] if message else []
        while candidates:
            one = candidates.pop()
            if not all(self._is_ready(one, rank) for rank in one.ranks):
                continue
            self._finish(one, able)
            for rank in one.ranks:
                queue = self.queue[rank, self.queue_of(one)]
                queue.popleft()
                candidates += [queue[0]] if queue else []

    def _is_ready(self, message: Message, rank: int) -> bool:
        queue = self.queue[rank, self.queue_of(message)]
        return not self.missing[message, rank] and bool(queue) and queue[0] == message

    def _finish(self, item: Action | Message, able: list[int]) -> None:
        for one in item.leaves if isinstance(item, Action) else (item,):
            self.done.add(one)
            able += self.waiting.pop(one, ())

    def _cycle(self, device: int) -> str:
        """Follow from a device that is stuck what waits for what, until it comes round."""
        reason: dict[int | tuple[Message, int], str] = {}
        at: int | tuple[Message, int] = device
        while at not in reason:
            reason[at], at = self._device_waits(at) if isinstance(at, int) else self._message_waits(*at)
        return "; ".join(list(reason.values())[list(reason).index(at) :])

    def _device_waits(self, device: int) -> tuple[str, int | tuple[Message, int]]:
        action = self.rows[device][self.position[device]]
        assert isinstance(action, Action)
        need, rank = self._awaited(action), self.rank_of[device]
        if isinstance(need, Message):
            return f"device {device} at {action} waits for {need.end(rank)}", (need, rank)
        assert need is not None
        return f"device {device} at {action} waits for {need}", self.device_of[need.stage]

    def _message_waits(self, message: Message, rank: int) -> tuple[str, int | tuple[Message, int]]:
        own = message.end(rank)
        if self.missing[message, rank]:
            device = next(
                device
                for device, row in enumerate(self.rows)
                if self.rank_of[device] == rank and message in row[self.position[device] :]
            )
            return f"{own} is not issued yet by device {device}", device
        first = self.queue[rank, self.queue_of(message)][0]
        if first != message:
            return f"{own} stands behind {first.end(rank)} on rank {rank}", (first, rank)
        other = next(rank for rank in message.ranks if not self._is_ready(message, rank))
        return f"{own} waits for {message.end(other)} on rank {other}", (message, other)


def _needs(lowering: Lowering) -> dict[Action, list[Action | Message]]:
    """What each action waits for: messages, and results of other devices of its rank."""
    schedule, rank_of = lowering.schedule, lowering.rank_of
    leaves = {leaf for row in schedule.actions for action in row for leaf in action.leaves}
    found: defaultdict[Action, list[Action | Message]] = defaultdict(list)
    for message in {message: None for order in lowering.orders for message in order}:
        for action in _readers(message, leaves):
            found[action].append(message)
    device_of = schedule.device_of
    for leaf in leaves:
        source = _source(leaf, schedule)
        if source is None or device_of[source] == device_of[leaf.stage]:
            continue
        if rank_of[device_of[source]] == rank_of[device_of[leaf.stage]]:
            made = (leaf._replace(kind=kind, stage=source) for kind in (Kind.F, Kind.B, Kind.I))
            is_forward = leaf.kind is Kind.F
            found[leaf] += [one for one in made if (one.kind is Kind.F) is is_forward and one in leaves]
    return found


def _source(leaf: Action, schedule: Schedule) -> int | None:
    """Return the stage whose result an action needs."""
    if leaf.kind is Kind.F:
        return schedule.previous_stage(leaf.stage)
    if leaf.kind in BACKWARDS and leaf.kind is not Kind.W:
        return schedule.next_stage(leaf.stage)
    return None


def _readers(message: Message, leaves: set[Action]) -> list[Action]:
    """Return the actions that wait for a message."""
    if message.kind is Kind.REDUCE_GRAD:
        return [step for stage in message.stages if (step := Action(Kind.OPT_STEP, stage)) in leaves]
    kinds = (Kind.F,) if message.kind is Kind.F else (Kind.B, Kind.I)
    made = (Action(kind, message.stages[1], message.micro_batch) for kind in kinds)
    return [action for action in made if action in leaves]
