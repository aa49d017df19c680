"""RankStatus: what one rank is doing now, and the TimeoutError built from the statuses of all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from .log import Channel, Message

_ANSWER_SECONDS = 1.5  # for ranks to say what they are doing


class RankStatus(NamedTuple):
    """The activity of a rank.

    Attributes:
        idle: seconds since it last began or ended anything.
        lines: in words, one a device.
        notes: stacks of what runs there.
    """

    idle: float
    lines: list[str]
    notes: list[str]


class Survey:
    """Asks all ranks for their status. Surveys are numbered: late answers to an earlier one do not count."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: SimpleQueue[Message] = SimpleQueue()

    def ask(self, channel: Channel, size: int, rank: int, status: RankStatus) -> dict[int, RankStatus]:
        """Return the statuses of the ranks that answer.

        Args:
            channel: to the others.
            size: the number of ranks.
            rank, status: of this one.
        """
        number = next(self._numbers)
        channel.send({"kind": "ask", "number": number})
        found = {rank: status}
        end = time.monotonic() + _ANSWER_SECONDS
        with suppress(Empty):
            while len(found) < size:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                if answer["number"] == number:
                    found[answer["from"]] = RankStatus(*answer["status"])
        return found

    def answer(self, channel: Channel, question: Message, status: RankStatus) -> None:
        """Answer another rank's question."""
        channel.send(
            {"kind": "answer", "number": question["number"], "status": status, "to": question["from"]}
        )

    def take(self, answer: Message) -> None:
        """Receive the answer of another rank."""
        self._answers.put(answer)


def timeout_error(
    timeout: float, size: int, statuses: Mapping[int, RankStatus], left: Container[int]
) -> TimeoutError:
    """Return the TimeoutError that lists which rank waits for which.

    Args:
        timeout: seconds in which nothing has happened.
        size: the number of ranks.
        statuses: of the ranks that answer.
        left: ranks that have closed the pipeline.
    """
    lines = [f"nothing has happened on any rank for {timeout:g} s, the timeout:"]
    notes: list[str] = []
    for rank in range(size):
        if rank in statuses:
            lines += [f"  rank {rank}: {line}" for line in statuses[rank].lines]
            notes += [f"pipepart: on rank {rank}, {note}" for note in statuses[rank].notes]
        elif rank in left:
            lines.append(f"  rank {rank} has closed the pipeline")
        else:
            lines.append(
                f"  rank {rank} does not answer: its process is stopped, or code in it keeps Python's lock (GIL)"
            )
    error = TimeoutError("\n".join(lines))
    for note in notes:
        error.add_note(note)
    return error
