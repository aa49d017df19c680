"""Memory that a stage overwrites after it has sent it to another rank is refused, as within one process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import schedules
from pipepart.autograd import graph_cut
from pipepart.runtime.transport.links import Table
from pipepart.runtime.transport.ranks import RankTransport
from schedules import Kind


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_message_that_is_overwritten_within_the_step_fails_it(overwrites: bool):
    """Bytes are sent from the memory of the message, and later than ``send`` returns."""
    links: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0),
        rank_of=[0, 1],
        ordered=lambda table: None,
        send=lambda *args: None,
        release=lambda fail: None,
    )
    inner: Any = None
    schedule = schedules.build("gpipe", devices=2, micro_batches=1)
    transport = RankTransport(inner, schedule, links, Table(), lambda parameter, stage: 0, [None], print, [])
    kept = torch.zeros(4)
    transport.send(0, 1, (Kind.F, 1, 0), graph_cut.cut(kept)[0])
    if not overwrites:
        transport.finish()
        return
    kept.add_(1)
    with pytest.raises(RuntimeError, match="was overwritten after the stage before it had sent it") as caught:
        transport.finish()
    assert "stage 0" in caught.value.__notes__[0]
