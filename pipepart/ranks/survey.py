"""A survey: a rank asks all others what they do, and waits a little for the answers."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from .doing import Doing
from .hub import Channel, Message

_ANSWER_SECONDS = 1.5  # for ranks to say what they are doing


class Survey:
    """The surveys of one rank, which are numbered: late answers to an earlier one do not count."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: SimpleQueue[Message] = SimpleQueue()

    def ask(self, channel: Channel, size: int, rank: int, mine: Doing) -> dict[int, Doing]:
        """Return what the ranks do, of those that answer.

        Args:
            channel: to the others.
            size: the number of ranks.
            rank, mine: this rank, and what it does.
        """
        number = next(self._numbers)
        channel.send({"kind": "ask", "number": number})
        found = {rank: mine}
        end = time.monotonic() + _ANSWER_SECONDS
        with suppress(Empty):
            while len(found) < size:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                if answer["number"] == number:
                    found[answer["from"]] = Doing(*answer["doing"])
        return found

    def answer(self, channel: Channel, question: Message, mine: Doing) -> None:
        """Answer another rank's question."""
        channel.send({"kind": "answer", "number": question["number"], "doing": mine, "to": question["from"]})

    def take(self, answer: Message) -> None:
        """Another rank has answered."""
        self._answers.put(answer)
