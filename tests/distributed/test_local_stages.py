"""Under torchrun each rank has the layers of its own stages only, and trains to the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import CaptureError, Pipeline
from pipepart.capture import RecordedChain
from pipepart.ranks import RankError
from tests.distributed.training import TIMEOUT, adam, gradients
from tests.support.chains import plan_by_hand
from tests.support.deferred import Tied, twins
from tests.support.local_stages import AsksBetween, AsksForMask, Blocks
from tests.support.ranks import Failed, assert_as_in_one_process, ranks
from tests.support.recorded import borders_of, chain_for


def cut(
    plain: nn.Module, model: nn.Module, args: tuple[Any, ...], stages: int, loss_fn: Any, **options: Any
) -> Pipeline:
    """A pipeline of a model whose layers are those that ``plain`` is recorded with."""
    chain = chain_for(plain, args, loss_fn=loss_fn)
    layers = [name for name, _ in chain.layers]
    verify = options.pop("verify", "first")
    own: Any = (
        RecordedChain(model, chain.groups, split_loss=loss_fn is None, verify=verify)
        if chain.groups
        else model
    )
    plan = plan_by_hand(layers, borders_of(len(layers), stages), micro_batches=2)
    return Pipeline(own, plan, loss_fn, timeout=TIMEOUT, **options)


def steps(pipe: Pipeline, words: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pipe:
        optimizer = adam(pipe.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            found["loss"] = pipe.step(words, target=words)
            optimizer.step()
        found["gradients"] = gradients(pipe)
        found["state"] = pipe.full_state_dict()
    return found


def tied(kind: str, stages: int, folder: Path) -> dict[str, Any]:
    plain, model = twins(Tied)
    words = torch.randint(12, (8,), generator=torch.Generator().manual_seed(1))
    options = {"weights": folder} if kind == "files" else {}
    pipe = cut(
        plain, plain if kind == "plain" else model, (words,), stages, nn.functional.cross_entropy, **options
    )
    return steps(pipe, words)


@pytest.mark.parametrize(("kind", "stages"), [("plain", 2), ("deferred", 2), ("deferred", 3), ("files", 3)])
def test_a_recorded_model_with_tied_weights(kind, stages, tmp_path):
    if kind == "files":
        files = pytest.importorskip("safetensors.torch")
        files.save_model(Tied(), str(tmp_path / "model.safetensors"))
    assert_as_in_one_process(tied, stages, kind, stages, tmp_path)


def shares() -> tuple[int, int, int]:
    """Bytes that a rank holds of a deferred model, of its own stage, and of the whole model."""

    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    plain, model = twins(make)
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=2)
    with Pipeline(model, plan, nn.functional.mse_loss, timeout=TIMEOUT) as pipe:
        pipe.step(torch.randn(4, 16), target=torch.randn(4, 16))
        held = sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)
        own = sum(tensor.nbytes for tensor in pipe.state_dict().values())
    return held, own, sum(tensor.nbytes for tensor in plain.parameters())


def test_three_ranks_hold_a_third_each():
    assert all(held == own == whole // 3 for held, own, whole in ranks(3).run(shares))


def without_batch(kind: type[nn.Module]) -> Tensor:
    """The loss of a step in which only the first and the last of three ranks are given the mini-batch."""
    model = kind()
    args = torch.randn(4, 4), torch.ones(4)
    chain = chain_for(model, args, loss_fn=nn.functional.mse_loss)
    layers = [name for name, _ in chain.layers]
    plan = plan_by_hand(layers, [1, 2], micro_batches=2)
    own: Any = RecordedChain(model, chain.groups, split_loss=False)
    with Pipeline(own, plan, nn.functional.mse_loss, timeout=TIMEOUT) as pipe:
        middle = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return pipe.step() if middle else pipe.step(*args, target=args[0])


def test_a_rank_in_the_middle_needs_no_batch_unless_code_reads_it():
    losses = ranks(3).run(without_batch, Blocks)
    assert all(torch.equal(one, losses[0]) for one in losses)
    first, second, third = ranks(3).outcomes(without_batch, AsksForMask)
    assert isinstance(second, Failed)
    assert isinstance(second.error, CaptureError)
    for one in (first, third):
        assert isinstance(one.error, RankError)
        assert "rank 1 cannot run without the values of the mini-batch: CaptureError" in str(one.error)


def refused(kind: type[nn.Module], verify: str) -> None:
    args = torch.randn(4, 4), torch.ones(4)
    model = kind()
    with cut(kind(), model, args, 2, nn.functional.mse_loss, verify=verify) as pipe:
        pipe.step(*args, target=args[0])


@pytest.mark.parametrize(
    ("kind", "verify", "error", "message"),
    [
        (Blocks, "always", ValueError, 'verify="always" runs the whole model'),
        (AsksBetween, "first", CaptureError, "reads values of tensors"),
    ],
)
def test_what_needs_the_whole_model_is_refused_on_all_ranks(kind, verify, error, message):
    found = ranks(2).outcomes(refused, kind, verify)
    assert all(isinstance(one, Failed) and isinstance(one.error, error) for one in found)
    assert all(message in str(one.error) for one in found)
