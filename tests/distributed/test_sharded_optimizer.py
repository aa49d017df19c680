"""torch's ZeroRedundancyOptimizer over the replicas trains, saves and loads as the optimizer without sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from tests.distributed.training import TIMEOUT, drawn_batches
from tests.support.plain import in_double
from tests.support.ranks import assert_same_bits, ranks
from tests.support.replicas import cut_replicas

HOW: dict[str, Any] = {"lr": 0.05, "amsgrad": True}


def pipeline(**options: Any) -> Pipeline:
    torch.manual_seed(3)
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.Dropout(0.2), nn.LayerNorm(4))]
    model = in_double(layers)
    return cut_replicas(model, [3], 2, micro_batches=4, loss_fn=nn.MSELoss(), timeout=TIMEOUT, **options)


def adam(pipe: Pipeline, sharded: bool) -> torch.optim.Optimizer:
    if not sharded:
        return torch.optim.AdamW(pipe.parameters(), **HOW)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert pipe.mesh is not None
    return ZeroRedundancyOptimizer(
        pipe.parameters(), torch.optim.AdamW, process_group=pipe.mesh.get_group("dp"), **HOW
    )


def train(folder: Path, load: bool, sharded: bool) -> dict[str, Any]:
    """Train four steps and save, or load and train two more."""
    sharded = sharded and dist.is_initialized()
    with pipeline() as pipe:
        optimizer = adam(pipe, sharded)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        if load:
            pipepart.load(folder, pipe, optimizer, scheduler=scheduler)
        losses = []
        for x, y in drawn_batches([8] * (2 if load else 4), width=4):
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=y))
            pipe.clip_grad_norm_(0.1)
            optimizer.step()
            scheduler.step()
        if not load:
            pipepart.save(folder, pipe, optimizer, step=4, scheduler=scheduler)
        kept = sum(len(one) for one in (optimizer.optim if sharded else optimizer).state.values())  # type: ignore[attr-defined]
        entries = torch.tensor(kept)
        if sharded:
            assert pipe.mesh is not None
            dist.all_reduce(entries, group=pipe.mesh.get_group("dp"))
            assert 0 < kept < entries  # a part of the state on each rank
            assert entries == 4 * len(list(pipe.parameters()))
        rate = optimizer.param_groups[0]["lr"]
        return {"losses": losses, "all": pipe.full_state_dict(), "rate": rate}


def on_ranks(folder: Path, load: bool, sharded: bool) -> dict[str, Tensor]:
    found = ranks(4).run(train, folder, load, sharded)
    return {**found[0]["all"], "rate": found[0]["rate"]}


def test_a_step_is_that_of_the_optimizer_without_sharding(tmp_path: Path) -> None:
    sharded, whole = on_ranks(tmp_path / "a", False, True), train(tmp_path / "b", False, False)
    assert_same_bits(sharded, {**whole["all"], "rate": whole["rate"]}, "state")


@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_loads_with_and_without_sharding(saves: bool, loads: bool, tmp_path: Path) -> None:
    """Without sharding in one process: the files are the same."""
    if saves:
        on_ranks(tmp_path, False, True)
    else:
        train(tmp_path, False, False)
    expected = train(tmp_path, True, False)
    if loads:
        found = on_ranks(tmp_path, True, True)
        assert_same_bits(found, {**expected["all"], "rate": expected["rate"]}, "state")
    else:
        train(tmp_path / "whole", False, False)
        assert_same_bits(train(tmp_path / "whole", True, False), expected, "state")
        assert expected["rate"] == HOW["lr"] / 4


def over_all_ranks(folder: Path) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pipeline() as pipe:
        optimizer = ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.SGD, lr=0.1)
        try:
            pipepart.save(folder, pipe, optimizer, step=1)
        except ValueError as error:
            return str(error)
    return ""


def test_another_group_is_refused(tmp_path: Path) -> None:
    for rank, message in enumerate(ranks(4).run(over_all_ranks, tmp_path)):
        here = [rank % 2, rank % 2 + 2]
        assert f"over the ranks [0, 1, 2, 3], and the replicas of this rank's stages are on {here}" in message


def of_stages() -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)

    try:
        pipeline(optimizer=make).close()
    except ValueError as error:
        return str(error)
    return ""


def test_stages_cannot_have_one() -> None:
    for message in ranks(4).run(of_stages):
        assert 'process_group=pipe.mesh.get_group("dp")' in message


def fully_sharded() -> str:
    from torch.distributed.fsdp import fully_shard

    with pipeline() as pipe:
        assert pipe.mesh is not None
        for layer in pipe.module.children():
            if any(not parameter.is_meta for parameter in layer.parameters()):
                fully_shard(layer, mesh=pipe.mesh["dp"])
        x, y = torch.randn(2, 8, 4, dtype=torch.float64)
        try:
            pipe.step(x, target=y)
        except ValueError as error:
            return str(error)
    return ""


def wrapped_before() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    try:
        cut_replicas(model, [1], 2, micro_batches=4, loss_fn=nn.MSELoss(), timeout=TIMEOUT).close()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"), [(fully_sharded, "is under fully_shard"), (wrapped_before, "'1' is under Distributed")]
)
def test_parameters_that_torch_shards_or_sums_are_refused_before_anything_runs(case, words) -> None:
    for message in ranks(4).run(case):
        assert words in message
        assert 'ZeroRedundancyOptimizer(..., process_group=pipe.mesh.get_group("dp"))' in message
