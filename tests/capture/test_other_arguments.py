"""A pipeline that was planned for some arguments runs with others: other branches, parameters and numbers of steps."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from pipepart import Arguments
from pipepart.capture import CaptureError
from tests.capture.families import quick
from tests.support.recorded import differing, piped, plainly

HOW: list[dict[str, Any]] = [
    {"stages": 2, "schedule": "gpipe", "recompute": "always"},
    {"stages": 3, "schedule": "1f1b", "strict": True},
    {"stages": 4, "schedule": "zb-h1"},
    {"stages": 4, "schedule": "interleaved-1f1b", "chunks": 2},
]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


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
        self.nothing = nn.Parameter(torch.randn(8))
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
            Arguments(noise(8, 6)),
            Arguments(noise(8, 6), "linear", head="scores"),
            Arguments(noise(5, 6), branch="none"),
        ],
    ),
    "a condition that is left out": (Guided, [Arguments(noise(8, 6), noise(8, 4)), Arguments(noise(8, 6))]),
    "a condition that comes later": (Guided, [Arguments(noise(8, 6)), Arguments(noise(8, 6), noise(8, 4))]),
    "a list of tensors": (
        Levels,
        [Arguments([noise(size, width) for width in (16, 8, 4)]) for size in (8, 5)],
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
        piped(Guided(), (noise(8, 6), noise(8, 4)), loss_fn=F.cross_entropy, parts=4) as pipe,
        pytest.raises(
            CaptureError,
            match=r"writes, at .*, 'scale' in layer .*make the plan with a sample for which it does",
        ),
    ):
        pipe.step(noise(8, 6), write=True, target=torch.zeros(8, dtype=torch.long))
