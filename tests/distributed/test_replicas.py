"""Under torchrun replicas share what they have learned, and what torch shards or sums over them is exact or refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from tests.distributed.cases.models import LOSSES, classifier, labelled
from tests.distributed.training import TIMEOUT, Own, drawn_batches, gradients
from tests.pipeline.conformance.layers import Moving
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import assert_same_bits, ranks

LOSS = nn.MSELoss()


def cut(model: nn.Module, borders: list[int], loss_fn: Any = LOSS, **how: Any) -> Pipeline:
    """Two replicas of two stages."""
    how = {"micro_batches": 4, "replicas": 2, "timeout": TIMEOUT, **how}
    return cut_by_hand(model, borders, loss_fn=loss_fn, **how)


def copied(pipe: Pipeline) -> Own:
    return Own({name: value.clone() for name, value in pipe.state_dict().items()})


def known_last() -> dict[str, Any]:
    pipe = cut(classifier(), [2], LOSSES["known last"], micro_batches=5)
    x, y = labelled((11,))[0]
    with pipe:
        return {"loss": pipe.step(x, target=y), "gradients": gradients(pipe), "state": pipe.full_state_dict()}


def test_a_count_of_the_output_corrects_the_gradients_of_all_replicas():
    found = ranks(4).run(known_last)
    model = classifier()
    model.load_state_dict(found[0]["state"])
    x, y = labelled((11,))[0]
    total, count = LOSSES["known last"](model(x), y)
    (total / count).backward()
    expected = plain.gradients(model)
    for one in found:
        plain.assert_near(one["loss"], total.detach() / count)
        plain.assert_close(one["gradients"], {name: expected[name] for name in one["gradients"]})


def unlike() -> dict[str, Any]:
    """Ranks make the model with other seeds, and later load other values."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()).double()
    x, y = drawn_batches([8])[0]
    with cut(model, [2]) as pipe:
        made = copied(pipe)
        pipe.step(x, target=y)
        trained = copied(pipe)
        pipe.load_state_dict({name: value + rank for name, value in pipe.full_state_dict().items()})
        mesh = pipe.mesh
        assert mesh is not None
        dist.barrier(mesh.get_group("dp"))
        place = {"at": tuple(mesh.get_coordinate() or ()), "mesh": (mesh.mesh.tolist(), mesh.mesh_dim_names)}
        return {"made": made, "trained": trained, "loaded": copied(pipe), **place}


def test_further_replicas_have_the_values_of_the_first():
    found = ranks(4).run(unlike)
    for first, other in ((0, 2), (1, 3)):
        for when in ("made", "trained", "loaded"):
            plain.assert_same(found[first][when], found[other][when])
    assert [one["at"] for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(one["mesh"] == ([[0, 1], [2, 3]], ("dp", "pp")) for one in found)
    assert found[0]["trained"]["1.running_mean"].any()
    assert found[0]["trained"]["1.num_batches_tracked"] == 2  # micro-batches of the first replica


HOW: dict[str, Any] = {"lr": 0.05, "amsgrad": True}


def pipeline(**options: Any) -> Pipeline:
    torch.manual_seed(3)
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.Dropout(0.2), nn.LayerNorm(4))]
    return cut(plain.in_double(layers), [3], **options)


def sharding(parameters: Any, kind: Any = torch.optim.SGD, **how: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import takes long

    return ZeroRedundancyOptimizer(parameters, kind, **{"lr": 0.1, **how})


def adamw(pipe: Pipeline, sharded: bool) -> torch.optim.Optimizer:
    if not sharded:
        return torch.optim.AdamW(pipe.parameters(), **HOW)
    assert pipe.mesh is not None
    return sharding(pipe.parameters(), torch.optim.AdamW, process_group=pipe.mesh.get_group("dp"), **HOW)


def train(folder: Path, load: bool, sharded: bool) -> dict[str, Any]:
    """Train four steps and save, or load and train two more."""
    sharded = sharded and dist.is_initialized()
    with pipeline() as pipe:
        optimizer = adamw(pipe, sharded)
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


def test_a_sharded_optimizer_steps_saves_and_loads_as_one_without_sharding(tmp_path: Path) -> None:
    """Without sharding in one process: the files are the same."""
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    expected = train(whole, False, False)
    assert_same_bits(on_ranks(sharded, False, True), {**expected["all"], "rate": expected["rate"]}, "trained")
    expected = train(whole, True, False)
    assert expected["rate"] == HOW["lr"] / 4
    wanted = {**expected["all"], "rate": expected["rate"]}
    assert_same_bits(train(sharded, True, False), expected, "sharded, then whole")
    assert_same_bits(on_ranks(sharded, True, True), wanted, "sharded, then sharded")
    assert_same_bits(on_ranks(whole, True, True), wanted, "whole, then sharded")


def over_all_ranks() -> None:
    with pipeline() as pipe:
        pipepart.save(Path(tempfile.gettempdir(), "never"), pipe, sharding(pipe.parameters()), step=1)


def of_stages() -> None:
    pipeline(optimizer=sharding).close()


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    with pipeline() as pipe:
        assert pipe.mesh is not None
        for layer in pipe.module.children():
            if any(not parameter.is_meta for parameter in layer.parameters()):
                fully_shard(layer, mesh=pipe.mesh["dp"])
        x, y = torch.randn(2, 8, 4, dtype=torch.float64)
        pipe.step(x, target=y)


def wrapped_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    cut(model, [1]).close()


INSTEAD = 'ZeroRedundancyOptimizer(..., process_group=pipe.mesh.get_group("dp"))'


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (over_all_ranks, "over the ranks [0, 1, 2, 3], and the replicas of this rank's stages are on {here}"),
        (of_stages, 'process_group=pipe.mesh.get_group("dp")'),
        (fully_sharded, f"is under fully_shard|{INSTEAD}"),
        (wrapped_before, f"'1' is under Distributed|{INSTEAD}"),
    ],
)
def test_other_ways_to_shard_or_to_sum_are_refused(case: Callable[[], None], words: str) -> None:
    for rank, one in enumerate(ranks(4).outcomes(case)):
        assert isinstance(one.error, ValueError)
        for part in words.format(here=[rank % 2, rank % 2 + 2]).split("|"):
            assert part in str(one.error)


def replaced() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), linear(), Moving("replaced")).double()
    with cut(model, [1]) as pipe:
        for x, y in drawn_batches([8, 8]):
            pipe.step(x, target=y)
        return {"own": copied(pipe), "state": pipe.full_state_dict()}


def test_buffers_that_a_forward_binds_anew_are_those_of_the_first_replica_on_all_ranks():
    found = ranks(4).run(replaced)
    for one in found:
        assert list(one["state"])[4:] == ["2.constant", "2.mean", "2.twin"]
        for name, value in one["own"].items():
            assert_same_bits(value, one["state"][name], name)
    assert sum("2.mean" in one["own"] for one in found) == 2
