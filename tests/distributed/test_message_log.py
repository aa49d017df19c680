"""All ranks read the same messages in the same order, and only those of their own start of the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from pipepart.ranks.log import Message, MessageLog
from pipepart.ranks.start import agree_on_start

SECONDS = 20.0


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_each(size: int, run: Callable[[int], Any]) -> list[Any]:
    """Call a function for each rank, on threads."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def logs(store: Any) -> Iterator[list[MessageLog]]:
    logs = on_each(3, lambda rank: MessageLog(rank, 3, store.clone(), SECONDS))
    yield logs
    on_each(3, lambda rank: logs[rank].end({"why": "the test has ended"}, wait=False))


class Reader:
    """Collects the messages of a channel, until a number of them is there."""

    def __init__(self, count: int) -> None:
        self.messages: list[Message] = []
        self._count = count
        self._complete = threading.Event()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) == self._count:
            self._complete.set()

    def wait(self) -> list[Message]:
        assert self._complete.wait(SECONDS), self.messages
        return self.messages


def test_an_exchange_gives_the_values_of_all_ranks_and_keeps_none(logs: list[MessageLog], store: Any):
    rounds = 30
    readers = [Reader(rounds), Reader(rounds), Reader(rounds)]
    channels = [log.open(reader) for log, reader in zip(logs, readers, strict=True)]
    before = 0
    for number in range(rounds):
        on_each(3, lambda rank, number=number: channels[rank].exchange(number, [rank, number]))
        for reader in readers:
            while len(reader.messages) <= number:
                assert not reader._complete.wait(0.001) or len(reader.messages) == rounds
        before = before or store.num_keys()
    for reader in readers:
        assert [one["values"] for one in reader.wait()] == [[[r, n] for r in range(3)] for n in range(rounds)]
    assert store.num_keys() <= before + 5  # however many exchanges there were


def test_what_an_earlier_start_of_the_job_has_left_does_not_count(store: Any):
    on_each(2, lambda rank: agree_on_start(rank, 2, store.clone(), SECONDS)).clear()
    old = store.get("pipepart/token")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(agree_on_start, 1, 2, store.clone(), SECONDS)  # comes before rank 0
        with pytest.raises(TimeoutError):
            second.result(0.3)
        first = agree_on_start(0, 2, store.clone(), SECONDS)
        first.set("key", "value")
        assert second.result().get("key") == b"value"
    assert store.get("pipepart/token") != old


def test_a_rank_that_does_not_come_is_named(store: Any):
    with pytest.raises(TimeoutError, match="of the 3 ranks 1, 2 did not make the pipeline"):
        agree_on_start(0, 3, store, 0.1)
    with pytest.raises(TimeoutError, match="rank 1 makes the pipeline and rank 0 does not"):
        agree_on_start(1, 3, store, 0.1)
