"""Under torchrun the virtual devices of each rank have their own memories, limits and speeds, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Pipeline
from tests.distributed.training import TIMEOUT, drawn_batches, trained
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.mixed import mixed
from tests.support.pieces import linear
from tests.support.ranks import Own, assert_as_in_one_process, ranks


def strict(schedule: str, chunks: int, recompute: Any) -> dict[str, Any]:
    pipe = cut_by_hand(
        mixed().double(),
        [2, 4, 6] if chunks == 2 else [4],
        loss_fn=nn.MSELoss(),
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        micro_batches=4,
        timeout=TIMEOUT,
        strict=True,
    )
    kept = {name: (use.by_category["parameters"], use.peak > 0) for name, use in pipe.memory().items()}
    return {**trained(pipe, drawn_batches([12, 9], width=4), max_norm=0.1), "memory": Own(kept)}


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute"), [("1f1b", 1, "never"), ("zb-v", 2, "never"), ("gpipe", 1, "always")]
)
def test_a_step_of_strict_devices(schedule, chunks, recompute):
    assert_as_in_one_process(strict, 2, schedule, chunks, recompute)


def too_small() -> str:
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    plan = plan.model_copy(update={"cluster": pipepart.Cluster.virtual(2, memory=3000, threads=1)})
    model = nn.Sequential(linear(), linear()).double()
    x, y = drawn_batches([400])[0]
    with Pipeline(model, plan, nn.MSELoss(), strict=True, timeout=TIMEOUT) as pipe:
        with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="is out of memory") as raised:
            pipe.step(x, target=y)
        return type(raised.value).__name__


def test_a_memory_limit_ends_the_step_on_all_ranks():
    assert "OutOfMemoryError" in ranks(2).run(too_small)


def slower() -> dict[str, Any]:
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    plan = plan.model_copy(update={"cluster": pipepart.Cluster.virtual(2, speed=[1, 0.25], threads=1)})
    model = nn.Sequential(linear(), linear()).double()
    return trained(Pipeline(model, plan, nn.MSELoss(), timeout=TIMEOUT), drawn_batches([8, 3]))


def test_a_step_of_devices_of_unequal_speeds():
    assert_as_in_one_process(slower, 2)
