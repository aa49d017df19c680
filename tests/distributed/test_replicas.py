"""Under torchrun replicas of a model train to the bits of replicas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.training import TIMEOUT, drawn_batches, trained
from tests.support.plain import in_double
from tests.support.ranks import assert_as_in_one_process
from tests.support.replicas import cut_replicas


def chain(stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [
        layer
        for _ in range(stages)
        for layer in (nn.Linear(4, 4), nn.Dropout(0.2), nn.LayerNorm(4), nn.GELU())
    ]
    return in_double(layers)


def steps(
    stages: int, replicas: int, schedule: str, chunks: int, recompute: str, **options: Any
) -> dict[str, Any]:
    pipe = cut_replicas(
        chain(stages),
        range(4, 4 * stages, 4),
        replicas,
        micro_batches=5,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        loss_fn=nn.MSELoss(),
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([10, 7, 1, 10], width=4), max_norm=0.1, **options)


CASES = [
    (2, (1, 2, "1f1b", 1, "never")),
    (2, (2, 2, "zb-v", 2, "never")),
    (4, (2, 2, "1f1b", 1, "always")),
    (4, (2, 2, "zb-h1", 1, "except-last")),
    (4, (1, 4, "gpipe", 1, "never")),
    (2, (2, 2, "1f1b", 1, "never")),
]


@pytest.mark.parametrize(("processes", "how"), CASES, ids=str)
def test_a_step_is_that_of_one_process(processes, how):
    assert_as_in_one_process(steps, processes, *how)
