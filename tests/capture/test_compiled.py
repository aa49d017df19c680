"""Compiled stages of recorded models: whole stages are one graph, and layers that read values run beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pipepart import CaptureError
from pipepart.capture.deep_copies import deep_copies
from tests.support.recorded import differing, piped, plainly


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y if mask is None else y * mask[..., None])


class Reads(nn.Module):
    """Drops its mask if that masks nothing, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = None if bool(mask.all()) else mask
        for block in self.blocks:
            x = block(x, kept)
        return x.square().mean()


def sample(length: int) -> dict[str, Any]:
    return {"x": torch.randn(4, length, 6), "mask": torch.ones(4, length)}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch.compiler.reset()


@pytest.mark.slow
def test_a_stage_is_compiled_once_and_for_other_lengths_once_more():
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Reads()
    (plain,) = deep_copies(model)
    compiled = []
    with piped(model, sample(5), stages=3, compile={"backend": backend}) as pipe:
        for length in (5, 5, 5, 7, 8, 9):
            given = sample(length)
            pipe.zero_grad()
            plain.zero_grad()
            loss = pipe.step(**given)
            torch.testing.assert_close(loss, plainly(plain, given))
            assert differing(model, plain) == []
            compiled.append(len(graphs))
    assert compiled == [0, 3, 3, 6, 6, 6]


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_that_is_compiled_already_is_refused(in_place):
    model: Any = Reads()
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(CaptureError, match=r"compiled by torch\.compile.*compile=True"):
        piped(model, sample(5))


@pytest.mark.slow
def test_blocks_that_are_compiled_already_stay_whole():
    torch.manual_seed(0)
    model = Reads()
    (plain,) = deep_copies(model)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[assignment]
    for block in model.blocks[1:]:
        block.compile(backend="eager")
    given = sample(5)
    with piped(model, given, stages=3) as pipe:
        loss = pipe.step(**given)
    torch.testing.assert_close(loss, plainly(plain, given))
    model.blocks[0] = model.blocks[0]._orig_mod  # type: ignore[assignment]  # whose parameters have the plain names
    assert differing(model, plain) == []
