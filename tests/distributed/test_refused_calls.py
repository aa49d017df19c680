"""Under torchrun calls that ranks do not make alike are refused on all of them, and the pipeline stays usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch

from pipepart import Pipeline
from pipepart.ranks import under_torchrun
from tests.distributed.cases.layers import cut_of_varying_shapes
from tests.distributed.training import adam, drawn_batches, gradients, rank, small
from tests.support.ranks import assert_as_in_one_process, ranks

X, Y = drawn_batches([6])[0]


class Wrong(NamedTuple):
    """A call of the pipeline by a rank, what is said about it, and how many forwards it makes before."""

    call: Callable[[Pipeline, int], Any]
    message: str
    forwards: int = 0


def _wrong_argument(pipe: Pipeline, rank: int) -> Any:
    more: dict[str, Any] = {"unknown": X[:2]} if rank == 1 else {}
    return pipe.step(X, target=Y, **more)


def _wrong_state(pipe: Pipeline, rank: int) -> None:
    """Of another shape on rank 0, for a layer of its own."""
    state = pipe.full_state_dict()
    pipe.load_state_dict({**state, next(iter(state)): torch.zeros(1)} if rank == 0 else state)


def _wrong_key(pipe: Pipeline, rank: int) -> None:
    pipe.load_state_dict({**pipe.full_state_dict(), **({"other": X} if rank else {})})


def _others_go_on(pipe: Pipeline, rank: int) -> None:
    out = pipe(X)
    if rank == 1:
        pipe.evaluate(X, target=Y)
    else:
        out.sum().backward()


def _another_order(pipe: Pipeline, rank: int) -> None:
    one, other = pipe(X), pipe(X)
    (other if rank else one).sum().backward()


def _written(pipe: Pipeline, rank: int) -> None:
    x = X.clone()
    out = pipe(x)
    if rank == 0:
        x.zero_()
    out.sum().backward()


WRONG: dict[str, Wrong] = {
    "shapes": Wrong(
        lambda pipe, rank: pipe.step(X[rank:], target=Y[rank:]),
        r"rank 1 was given another mini-batch than rank 0: .*\(5, .* in place of .*\(6, ",
    ),
    "dtype": Wrong(
        lambda pipe, rank: pipe.step(X.float() if rank == 2 else X, target=Y),
        r"rank 2 was given another mini-batch than rank 0: .*float32.* in place of .*float64",
    ),
    "values": Wrong(
        lambda pipe, rank: pipe.step(X + rank, target=Y),
        "rank 1 was given another mini-batch than rank 0: it has other values",
    ),
    "target": Wrong(
        lambda pipe, rank: pipe.step(X, target=Y + rank), "another target than rank 0: it has other values"
    ),
    "last has no target": Wrong(
        lambda pipe, rank: pipe.step(X, target=None if rank == 2 else Y),
        "rank 2 runs the last stage and was given no target",
    ),
    "argument": Wrong(_wrong_argument, "unknown|rank 1 refuses step"),
    "no tensor": Wrong(
        lambda pipe, rank: pipe.step("x" if rank == 0 else X, target=Y), "the input must hold a tensor"
    ),
    "first has none": Wrong(
        lambda pipe, rank: pipe.step(*([] if rank == 0 else [X]), target=Y),
        "rank 0 runs the first stage and was given no mini-batch",
    ),
    "call": Wrong(
        lambda pipe, rank: pipe.evaluate(X, target=Y) if rank else pipe.step(X, target=Y),
        "rank 1 calls evaluate.*while rank 0 calls step",
    ),
    "options": Wrong(
        lambda pipe, rank: pipe.step(X, target=Y, return_outputs=rank == 1),
        "return_outputs=True.*return_outputs=False",
    ),
    "weight": Wrong(
        lambda pipe, rank: pipe.step(X, target=Y, loss_weight=1 + rank), "loss_weight=2.*loss_weight=1"
    ),
    "norm": Wrong(
        lambda pipe, rank: pipe.clip_grad_norm_(1.0 + rank),
        r"rank 1 calls clip_grad_norm_\(2\.0, 2\.0.*while rank 0 calls clip_grad_norm_\(1\.0, 2\.0",
    ),
    "no number": Wrong(
        lambda pipe, rank: pipe.clip_grad_norm_(cast(Any, "x") if rank else 1.0),
        "could not convert|refuses|calls",
    ),
    "clip": Wrong(
        lambda pipe, rank: pipe.clip_grad_norm_(1.0) if rank else pipe.step(X, target=Y),
        "rank 1 calls clip_grad_norm_.*while rank 0 calls step",
    ),
    "mode": Wrong(lambda pipe, rank: pipe.train(rank != 1).step(X, target=Y), "in another mode"),
    "state": Wrong(_wrong_state, "size mismatch|rank 0 refuses load_state_dict"),
    "key": Wrong(_wrong_key, "Unexpected key|rank 1 refuses load_state_dict"),
    "backward of one": Wrong(
        _others_go_on, "rank 1 calls evaluate.*while rank 0 calls the backward of the output of call", 1
    ),
    "order of backwards": Wrong(
        _another_order,
        r"rank 1 calls the backward of the output of call (\d+) .*while rank 0 .* output of call (?!\1\b)\d+ ",
        2,
    ),
    "written into": Wrong(_written, "modified by an inplace operation", 1),
}


def refused() -> dict[str, Any]:
    """Steps of one pipeline, and between them the calls that are refused."""
    with small(strict=True) as pipe:
        losses = [pipe.step(X, target=Y)]
        for name, wrong in WRONG.items():
            before = gradients(pipe)
            if under_torchrun():
                try:
                    wrong.call(pipe, rank())
                except (TypeError, ValueError, RuntimeError) as error:
                    assert re.search(wrong.message, str(error)), f"{name}: {error}"  # noqa: PT017
                else:
                    raise AssertionError(f"{name} was not refused")
                pipe.train()
            else:
                for _ in range(wrong.forwards):  # which draw
                    pipe(X)
            assert str(gradients(pipe)) == str(before), name
            losses.append(pipe.step(X, target=Y))
        return {"losses": losses, "gradients": gradients(pipe), "generator": torch.get_rng_state()}


def test_what_ranks_do_not_do_alike_is_refused_before_anything_runs():
    assert_as_in_one_process(refused, 3)


def undeclared() -> str:
    with cut_of_varying_shapes() as pipe:
        optimizer = adam(pipe.parameters())

        def train() -> None:
            for x, y in drawn_batches([9] * 5):
                pipe.step(x, target=y)
                optimizer.step()

        with pytest.raises(RuntimeError) as raised:
            train()
        return str(raised.value)


def test_shapes_that_depend_on_values_are_refused_unless_that_is_said():
    for text in ranks(3).run(undeclared):
        assert "passes tensors of another form" in text
        assert "varying_shapes=True" in text
