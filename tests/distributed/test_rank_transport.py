"""Failures of messages between ranks: memory that is missing, or overwritten, and errors that keep their type."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import schedules
from pipepart.autograd import graph_cut
from pipepart.ranks import Ranks
from pipepart.ranks.failure import RankError, remote_exception, serialize_exception
from pipepart.runtime.transport.links import Entry, Table
from pipepart.runtime.transport.ranks import RankTransport
from pipepart.runtime.transport.wire import Form
from schedules import Kind

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
