"""Out of memory stays torch.OutOfMemoryError: on the rank that has no memory left, and on all others."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import schedules
from pipepart.ranks import Ranks
from pipepart.ranks.failure import RankError, remote_exception, serialize_exception
from pipepart.runtime.transport.links import Entry, Table
from pipepart.runtime.transport.ranks import RankTransport
from pipepart.runtime.transport.wire import Form
from schedules import Kind


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate 2 GiB"), MemoryError()])
def test_other_ranks_raise_the_same_type(error: BaseException):
    found = remote_exception(1, json.loads(json.dumps(serialize_exception(error))))
    assert isinstance(found, RankError)
    assert isinstance(found, torch.OutOfMemoryError)
    assert str(found).startswith(f"rank 1 failed: {type(error).__name__}")


def test_another_error_is_not_out_of_memory_on_other_ranks():
    assert not isinstance(remote_exception(1, serialize_exception(ValueError("no"))), torch.OutOfMemoryError)


def test_no_memory_for_a_message_is_not_a_broken_connection():
    """The receives of a worker are posted ahead: one is larger than any memory."""
    key = (Kind.F, 1, 0)
    huge = Entry(key, Form((), None, None, (2**60,)), rank=0, tag=0, is_sent=False)
    ranks: Any = object.__new__(Ranks)  # of which nothing is asked
    ranks.rank = 1
    links: Any = SimpleNamespace(ranks=ranks, rank_of=[0, 1], ordered=lambda table: None)
    failures: list[BaseException] = []
    transport = RankTransport(
        SimpleNamespace(),  # type: ignore[arg-type]
        schedules.build("gpipe", devices=2, micro_batches=1),
        links,
        Table(rows={1: [huge]}, complete=True),
        lambda parameter, stage: 0,
        [],
        failures.append,
        [],
    )
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        transport.begin(1)
    assert not failures
