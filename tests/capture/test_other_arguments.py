"""Pipelines of recorded models run with other arguments than were planned; compiled stages are one graph."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn, randn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from pipepart import Arguments, CaptureError
from pipepart.capture import chain_of
from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import quick
from tests.support.awkward import blocks
from tests.support.recorded import differing, piped, plainly

HOW: list[dict[str, Any]] = [
    {"stages": 2, "schedule": "gpipe", "recompute": "always"},
    {"stages": 3, "schedule": "1f1b", "strict": True},
    {"stages": 4, "schedule": "zb-h1"},
    {"stages": 4, "schedule": "interleaved-1f1b", "chunks": 2},
]


class Branches(nn.Module):
    """A branch and a head are chosen by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleDict(
            {
                "plain": nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
                "none": nn.Identity(),
                "linear": nn.Linear(8, 8),
            }
        )
        self.heads = nn.ModuleDict({"classes": nn.Linear(8, 3), "scores": nn.Linear(8, 3)})

    def forward(self, x: Tensor, branch: str = "plain", head: str = "classes") -> Tensor:
        return self.heads[head](self.branches[branch](self.stem(x)))


class Guided(nn.Module):
    """What stands for a condition that is left out is a parameter of the model itself, added in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.condition = nn.Linear(4, 8)
        self.nothing = nn.Parameter(randn(8))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor, given: Tensor | None = None, write: bool = False) -> Tensor:
        y = self.enter(x)
        added = None if given is None else self.condition(given)
        for block in self.blocks:
            y = y + torch.tanh(block(y + (self.nothing * self.scale if added is None else added)))
            if write:
                self.scale.add_(1)
        return self.leave(y)


class Decoder(nn.Module):
    """A loop over the steps of a sequence in the model itself, with attention to all of an encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.step = nn.GRUCell(16, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, source: Tensor, steps: int) -> Tensor:
        states, last = self.encoder(self.embed(source))
        state, found = last[0], []
        for _ in range(steps):
            weights = torch.einsum("bd,btd->bt", state, states).softmax(-1)
            seen = torch.einsum("bt,btd->bd", weights, states)
            state = self.step(torch.cat([seen, state], -1), state)
            found.append(state)
        return self.out(torch.stack(found, 1).mean(1))


class Levels(nn.Module):
    """A list of tensors of several sizes in; each is added to the next larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ModuleList([nn.Linear(size, size // 2) for size in (16, 8, 4)])
        self.leave = nn.Linear(2, 3)

    def forward(self, levels: list[Tensor]) -> Tensor:
        x = torch.zeros_like(levels[0])
        for layer, level in zip(self.enter, levels, strict=True):
            x = layer(x + level)
        return self.leave(x)


WORDS = torch.randint(12, (8, 5), generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[type[nn.Module], list[Arguments]]] = {
    "branches": (
        Branches,
        [
            Arguments(randn(8, 6)),
            Arguments(randn(8, 6), "linear", head="scores"),
            Arguments(randn(5, 6), branch="none"),
        ],
    ),
    "a condition that is left out": (
        Guided,
        [Arguments(randn(8, 6), randn(8, 4)), Arguments(randn(8, 6))],
    ),
    "a condition that comes later": (
        Guided,
        [Arguments(randn(8, 6)), Arguments(randn(8, 6), randn(8, 4))],
    ),
    "a list of tensors": (
        Levels,
        [Arguments([randn(size, width) for width in (16, 8, 4)]) for size in (8, 5)],
    ),
    "more steps, then fewer": (
        Decoder,
        [Arguments(WORDS, 4), Arguments(WORDS, 7), Arguments(WORDS[:, :2], 1)],
    ),
}


QUICK = [(name, index % len(HOW)) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "way"), quick(QUICK, itertools.product(CASES, range(len(HOW)))))
def test_gradients_are_those_of_plain_micro_batches_for_all_of_them(name, way):
    make, calls = CASES[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    model, plain = models
    target = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))
    with piped(model, calls[0], loss_fn=F.cross_entropy, parts=4, **HOW[way]) as pipe:
        for given in calls:
            own = target[: len(tree_leaves(given.args)[0])]
            model.zero_grad()
            plain.zero_grad()
            pipe.step(*given.args, target=own, **given.kwargs)
            plainly(plain, given, target=own, loss_fn=F.cross_entropy, parts=4)
            assert differing(model, plain) == []


def test_a_loop_over_several_modules_takes_no_more_steps_than_were_planned():
    class Two(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, source: Tensor, steps: int) -> Tensor:
            state = self.embed(source).mean(1)
            for _ in range(steps):
                state = self.mix(self.step(torch.cat([state, state], -1), state))
            return self.out(state)

    with piped(Two(), (WORDS, 3), loss_fn=F.cross_entropy, parts=4) as pipe:
        target = torch.zeros(8, dtype=torch.long)
        pipe.step(WORDS, 2, target=target)
        with pytest.raises(
            CaptureError, match=r"'mix' 5 times, and 3 times in the plan.*the greatest length"
        ):
            pipe.step(WORDS, 5, target=target)


def test_a_buffer_that_comes_from_another_layer_must_not_be_written():
    with (
        piped(Guided(), (randn(8, 6), randn(8, 4)), loss_fn=F.cross_entropy, parts=4) as pipe,
        pytest.raises(
            CaptureError,
            match=r"writes, at .*, 'scale' in layer .*make the plan with a sample for which it does",
        ),
    ):
        pipe.step(randn(8, 6), write=True, target=torch.zeros(8, dtype=torch.long))


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
    return {"x": randn(4, length, 6), "mask": torch.ones(4, length)}


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


X = randn(8, 6, generator=torch.Generator().manual_seed(3))
Y = randn(8, 6, generator=torch.Generator().manual_seed(4))


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor, y: Tensor, options: Any) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * options.scale
        return x + y


@pytest.mark.parametrize("first", [X, Y])
def test_an_argument_that_is_given_twice_or_changes_inside_is_another_call(first):
    model, options = _Both(), SimpleNamespace(scale=1.0)
    with piped(model, Arguments(X, first, options), loss_fn=F.mse_loss) as pipe, torch.no_grad():
        for second, options.scale in ((X, 1.0), (Y, 1.0), (Y, 2.0)):
            expected = torch.cat([model(X[:4], second[:4], options), model(X[4:], second[4:], options)])
            assert torch.equal(pipe(X, second, options), expected)


def test_globals_with_names_of_attributes_are_not_read(monkeypatch):
    chain: Any = chain_of(_Both(), split_loss=False)
    calls = (X, Y, SimpleNamespace(scale=1.0)), {}
    recordings = []
    for value in (0.0, 1.0):
        monkeypatch.setitem(globals(), "blocks", torch.tensor(value))
        recordings.append(chain.bind(*calls).live.recording)
    assert recordings[0] is recordings[1]
