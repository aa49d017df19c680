"""The event loop with ports that several devices share: messages pass a port in the order of sending.

A port, such as the network card of a host, carries one message at a time. A message waits until all its ports are free
and every message that was sent before it has left them. So the order of messages follows from the times, and the loop
goes through the ends of operations in the order of time::

    device 0  [F]───► port ██████           sent first
    device 1  [ F ]─────► port ..... ██████  waits for the port
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ..core.costs import StageCosts
from ..core.dependencies import Dependencies
from ..core.schedule import Schedule
from .event_loop import PENDING, Operations
from .skips import messages


class Message(NamedTuple):
    """A message that passes ports.

    seconds: from when it leaves until it has passed the slowest of its ports; its latency comes on top.
    ports: the number of each port, and the seconds for which the message occupies it.
    """

    seconds: float
    ports: Sequence[tuple[int, float]]


def port_messages(
    schedule: Schedule, costs: StageCosts, found: Dependencies, seconds: np.ndarray
) -> dict[int, Message]:
    """Map the number of an edge to its message, for messages that pass ports.

    seconds: of each edge, those between its leaving and its having passed the link.
    """
    numbers: dict[Hashable, int] = {}
    routes: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for one, other, size in messages(schedule, costs):
        for source, target in ((one, other), (other, one)):
            route = costs.ports.get((schedule.device_of[source], schedule.device_of[target]), ())
            if route and size:
                routes[source, target] = [
                    (numbers.setdefault(port, len(numbers)), size / speed) for port, speed in route
                ]
    found_messages: dict[int, Message] = {}
    pairs = zip(found.source_stage.tolist(), found.target_stage.tolist(), strict=True)
    for edge, pair in enumerate(pairs):
        if (route := routes.get(pair)) is not None:
            slowest = max(occupied for _, occupied in route)
            found_messages[edge] = Message(max(float(seconds[edge]), slowest), route)
    return found_messages


def play_shared(
    operations: Operations, rows: Sequence[Sequence[int]], through: Mapping[int, Message]
) -> tuple[list[float], bool, dict[int, float]]:
    """Return the end of each operation, True if all can run, and the time at which each message left.

    Takes O(n log n) for n operations. Of messages sent at the same time that of the lower operation goes first.

    rows: the operations of each device, in order.
    through: by the operation that waits for it. `Operations.delay` of that operation is the latency.
    """
    seconds, source, delay = operations
    reader, row_of = _reader_and_row(source, rows)
    ends = [PENDING] * len(source)
    arrived = [0.0 if needed < 0 else PENDING for needed in source]
    position, clock = [0] * len(rows), [0.0] * len(rows)
    free: dict[int, float] = {}
    left: dict[int, float] = {}
    events: list[tuple[float, int]] = []

    def start(number: int) -> None:
        """Start the next operation of an idle row if the time at which its input arrives is known."""
        row, at = rows[number], position[number]
        if at < len(row) and (there := arrived[row[at]]) >= 0:
            position[number] = at + 1
            heappush(events, (max(there, clock[number]) + seconds[row[at]], row[at]))
            clock[number] = PENDING  # busy

    for number in range(len(rows)):
        start(number)
    while events:
        now, operation = heappop(events)
        ends[operation] = now
        number, waiting = row_of[operation], reader[operation]
        clock[number] = now
        if waiting >= 0:
            message = through.get(waiting)
            if message is None:
                arrived[waiting] = now + delay[waiting]
            else:
                left[waiting] = departs = _pass(message, now, free)
                arrived[waiting] = departs + (delay[waiting] + message.seconds)
            if clock[row_of[waiting]] >= 0:
                start(row_of[waiting])
        if clock[number] >= 0:
            start(number)
    return ends, min(ends, default=0.0) >= 0, left


def _pass(message: Message, now: float, free: dict[int, float]) -> float:
    """Return when a message leaves that is sent now, and keep its ports for it."""
    departs = max(now, *(free.get(port, 0.0) for port, _ in message.ports))
    for port, occupied in message.ports:
        free[port] = departs + occupied
    return departs


def _reader_and_row(source: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the operation that reads each operation's result, -1 for none, and the row of each."""
    reader, row_of = [-1] * len(source), [0] * len(source)
    for operation, needed in enumerate(source):
        if needed >= 0:
            reader[needed] = operation
    for number, row in enumerate(rows):
        for operation in row:
            row_of[operation] = number
    return reader, row_of
