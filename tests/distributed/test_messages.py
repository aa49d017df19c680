"""Messages between ranks: read in one order, failures that end all waits, and memory that is missing or overwritten."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

import schedules
from pipepart.autograd import graph_cut
from pipepart.ranks import RankError, Ranks
from pipepart.ranks.failure import remote_exception, serialize_exception
from pipepart.ranks.log import Message, MessageLog
from pipepart.ranks.start import agree_on_start
from pipepart.runtime.transport.links import Table
from pipepart.runtime.transport.ordered import Entry
from pipepart.runtime.transport.ranks import RankTransport
from pipepart.runtime.transport.wire import Form
from schedules import Kind
from tests.distributed.test_as_in_one_process import without_tags
from tests.distributed.training import TIMEOUT
from tests.support.chains import cut_by_hand
from tests.support.ranks import Failed, ranks

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


def test_an_exchange_gives_the_values_of_all_ranks_and_keeps_none(logs: list[MessageLog], store: Any):
    rounds = 30
    read: list[list[Message]] = [[], [], []]
    channels = [log.open(messages.append) for log, messages in zip(logs, read, strict=True)]
    before, until = 0, time.monotonic() + SECONDS
    for number in range(rounds):
        on_each(3, lambda rank, number=number: channels[rank].exchange(number, [rank, number]))
        while min(map(len, read)) <= number:
            assert time.monotonic() < until, read
            time.sleep(0.001)
        before = before or store.num_keys()
    for messages in read:
        assert [one["values"] for one in messages] == [[[r, n] for r in range(3)] for n in range(rounds)]
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


_SLOW_SECONDS = 60.0  # of a layer, whose end nobody waits for


class Doing(nn.Module):
    """Does something in each forward."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.act(self.calls)
        return self.linear(x)


def failing() -> str:
    def fail(call: int) -> None:
        if call == 8:
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(2, 2), Doing(fail), nn.Linear(2, 2))
    x = torch.ones(9, 2)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        for _ in range(2):  # from the second on in one order
            pipe.step(x, target=x)
        with pytest.raises(Exception, match="on purpose") as raised:
            pipe.step(x, target=x)
        return type(raised.value).__name__


def test_a_failure_ends_the_step_on_all_ranks():
    assert ranks(3).run(without_tags, failing) == ["RankError", "ValueError", "RankError"]


def fails_beside_a_wait() -> float:
    """Stage 0 fails when stage 1, beside it, waits for gradients that stage 2 does not send."""
    unsent = threading.Lock()  # layers that share Python values need a profile
    unsent.acquire()

    def fail(call: int) -> None:
        if call == 2:
            assert unsent.acquire(timeout=_SLOW_SECONDS)
            time.sleep(0.3)  # until the other worker waits
            raise ValueError("out of ideas")

    def send(call: int) -> None:
        if unsent.locked():
            unsent.release()

    acts = [fail, send, lambda _: time.sleep(_SLOW_SECONDS), lambda _: None]
    model = nn.Sequential(*(Doing(act) for act in acts))
    began = time.monotonic()
    with cut_by_hand(model, [1, 2, 3], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        with pytest.raises((ValueError, RankError), match="out of ideas"):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
        return time.monotonic() - began


def test_a_worker_that_waits_for_another_rank_ends_with_the_failure_beside_it():
    found = ranks(2).outcomes(fails_beside_a_wait)
    assert not [one for one in found if isinstance(one, Failed)], found
    assert max(found) < _SLOW_SECONDS / 2


KEY = (Kind.F, 1, 0)


def transport(ranks: Any, table: Table, fail: Any = print) -> RankTransport:
    """Of a rank, from which no message comes to any other."""
    links: Any = SimpleNamespace(ranks=ranks, rank_of=[0, 1], ordered=lambda table: None)
    links.send, links.release = (lambda *args: None), (lambda fail: None)
    schedule, inner = schedules.build("gpipe", devices=2, micro_batches=1), SimpleNamespace()
    return RankTransport(inner, schedule, links, table, lambda parameter, stage: 0, [None], fail, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), MemoryError(), ValueError("no")])
def test_other_ranks_raise_that_memory_was_missing_and_nothing_else_as_such(error: BaseException):
    found = remote_exception(1, json.loads(json.dumps(serialize_exception(error))))
    assert isinstance(found, RankError)
    assert isinstance(found, torch.OutOfMemoryError) == (type(error) is not ValueError)
    assert str(found).startswith(f"rank 1 failed: {type(error).__name__}")


def test_no_memory_for_a_message_is_not_a_broken_connection():
    """The receives of a worker are posted ahead: one is larger than any memory."""
    huge = Entry(KEY, Form((), None, None, (2**60,)), rank=0, tag=0, is_sent=False)
    ranks: Any = object.__new__(Ranks)  # of which nothing is asked
    ranks.rank = 1
    failures: list[BaseException] = []
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        transport(ranks, Table(rows={1: [huge]}, complete=True), failures.append).begin(1)
    assert not failures


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_message_that_is_overwritten_within_the_step_fails_it(overwrites: bool):
    """Bytes are sent from the memory of the message, and later than ``send`` returns."""
    sending, kept = transport(SimpleNamespace(rank=0), Table()), torch.zeros(4)
    sending.send(0, 1, KEY, graph_cut.cut(kept)[0])
    if not overwrites:
        sending.finish()
        return
    kept.add_(1)
    with pytest.raises(RuntimeError, match="was overwritten after the stage before it had sent it") as caught:
        sending.finish()
    assert "stage 0" in caught.value.__notes__[0]
