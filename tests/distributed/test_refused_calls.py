"""Under torchrun calls that ranks do not make alike are refused on all of them, and the pipeline stays usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from pipepart import Pipeline
from pipepart.ranks import under_torchrun
from tests.distributed.cases.layers import cut_of_varying_shapes
from tests.distributed.training import drawn_batches, gradients, rank, small, trained
from tests.support.ranks import assert_as_in_one_process, ranks

X, Y = drawn_batches([6])[0]


class Wrong(NamedTuple):
    """A call of the pipeline by a rank, what is said about it, and how many forwards it makes before."""

    call: Callable[[Pipeline, int], Any]
    message: str
    forwards: int = 0


def step(own: Callable[[int], dict[str, Any]]) -> Callable[[Pipeline, int], Any]:
    """A step with something of its own on a rank: ``x``, ``target``, or further keywords."""

    def call(pipe: Pipeline, rank: int) -> Any:
        given = {"x": X, "target": Y, **own(rank)}
        x = given.pop("x")
        return pipe.step(*([] if x is None else [x]), **given)

    return call


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


def _load(own: Callable[[dict[str, Any], int], dict[str, Any]]) -> Callable[[Pipeline, int], Any]:
    def call(pipe: Pipeline, rank: int) -> None:
        state = pipe.full_state_dict()
        pipe.load_state_dict({**state, **own(state, rank)})

    return call


WRONG: dict[str, Wrong] = {
    "shapes": Wrong(
        step(lambda rank: {"x": X[rank:], "target": Y[rank:]}),
        r"rank 1 was given another mini-batch than rank 0: .*\(5, .* in place of .*\(6, ",
    ),
    "values": Wrong(
        step(lambda rank: {"x": X + rank}),
        "rank 1 was given another mini-batch than rank 0: it has other values",
    ),
    "target": Wrong(
        step(lambda rank: {"target": Y + rank}), "another target than rank 0: it has other values"
    ),
    "last has no target": Wrong(
        step(lambda rank: {"target": None if rank == 2 else Y}),
        "rank 2 was given another target than rank 0",
    ),
    "argument": Wrong(
        step(lambda rank: {"unknown": X[:2]} if rank == 1 else {}), "unknown|rank 1 refuses step"
    ),
    "no tensor": Wrong(step(lambda rank: {"x": X if rank else "x"}), "the input must hold a tensor"),
    "first has none": Wrong(
        step(lambda rank: {"x": X if rank else None}),
        "step was given no mini-batch",
    ),
    "call": Wrong(
        lambda pipe, rank: pipe.evaluate(X, target=Y) if rank else pipe.step(X, target=Y),
        "rank 1 calls evaluate.*while rank 0 calls step",
    ),
    "options": Wrong(
        step(lambda rank: {"return_outputs": rank == 1}), "return_outputs=True.*return_outputs=False"
    ),
    "norm": Wrong(
        lambda pipe, rank: pipe.clip_grad_norm_(1.0 + rank),
        r"rank 1 calls clip_grad_norm_\(2\.0, 2\.0.*while rank 0 calls clip_grad_norm_\(1\.0, 2\.0",
    ),
    "gradient": Wrong(
        step(lambda rank: {"x": X.clone().requires_grad_(rank == 1)}), "rank 1 was given another mini-batch"
    ),
    "mode": Wrong(lambda pipe, rank: pipe.train(rank != 1).step(X, target=Y), "in another mode"),
    "state": Wrong(
        _load(lambda state, rank: {} if rank else {next(iter(state)): torch.zeros(1)}),
        "size mismatch|rank 0 refuses load_state_dict",
    ),
    "key": Wrong(
        _load(lambda state, rank: {"other": X} if rank else {}),
        "Unexpected key|rank 1 refuses load_state_dict",
    ),
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
                with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
                    wrong.call(pipe, rank())
                assert re.search(wrong.message, str(raised.value)), f"{name}: {raised.value}"
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
    with pytest.raises(RuntimeError) as raised:
        trained(cut_of_varying_shapes(), drawn_batches([9] * 5))
    return str(raised.value)


def test_shapes_that_depend_on_values_are_refused():
    for text in ranks(3).run(undeclared):
        assert "passes tensors of another form" in text
        assert "colocate=" in text
