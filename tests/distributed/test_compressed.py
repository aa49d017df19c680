"""Under torchrun compressed messages give the bits that they give in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import Keeps, Packs, Unpacks
from tests.distributed.training import TIMEOUT, drawn_batches, trained
from tests.support.chains import cut_by_hand
from tests.support.pieces import linear
from tests.support.plain import in_double
from tests.support.ranks import assert_as_in_one_process
from tests.support.recorded import piped
from tests.support.skipping import WIDTH, Hourglass


def chain(stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    return in_double(
        [layer for _ in range(stages) for layer in (nn.Linear(4, 4), nn.Dropout(0.2), nn.GELU())]
    )


def steps(to: Any, stages: int, chunks: int, schedule: str, replicas: int, recompute: Any) -> dict[str, Any]:
    pipe = cut_by_hand(
        chain(stages),
        range(3, 3 * stages, 3),
        loss_fn=nn.MSELoss(),
        micro_batches=5,
        chunks=chunks,
        schedule=schedule,
        replicas=replicas,
        recompute=recompute,
        compress=to,
        timeout=TIMEOUT,
    )
    with pipe.trace() as trace:
        found = trained(pipe, drawn_batches([10, 7, 1, 10], width=4), max_norm=0.1)
    return {**found, "errors": trace.compression_errors}


CASES = [
    (2, ("bf16", 2, 1, "1f1b", 1, "never")),
    (2, ("int8", 4, 2, "zb-v", 1, "always")),
    (3, ("int8", 3, 1, "zb-h1", 1, "never")),
    (4, ("int8", 2, 1, "gpipe", 2, "except-last")),
]


@pytest.mark.parametrize(("processes", "how"), CASES, ids=str)
def test_a_step_is_that_of_one_process(processes, how):
    assert_as_in_one_process(steps, processes, *how)


def past_stages(to: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    batches = drawn_batches([8, 8, 8], width=WIDTH)
    pipe = piped(
        Hourglass(3).double(),
        batches[0][0],
        loss_fn=nn.MSELoss(),
        stages=3,
        parts=4,
        compress=to,
        timeout=TIMEOUT,
    )
    return trained(pipe, batches)


def test_values_that_go_past_stages():
    assert_as_in_one_process(past_stages, 3, "int8")


def of_nests(to: Any) -> dict[str, Any]:
    model = nn.Sequential(linear(), Packs(), Keeps(), Unpacks(), linear()).double()
    pipe = cut_by_hand(model, [2, 3], loss_fn=nn.MSELoss(), compress=to, timeout=TIMEOUT)
    return trained(pipe, drawn_batches([9, 6, 2, 9]))


def test_messages_keep_their_nest_layout_and_shared_memory():
    assert_as_in_one_process(of_nests, 3, "bf16")
