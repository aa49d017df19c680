# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models that ask who is called, and how: classes of blocks, aliases, functions given functions, compiled blocks."""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.awkward import Base, D, refused, right


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


round_straight = _Round.apply
# Since torch 2.14 apply is no Python code, and calls of it by another name are not seen.
of_an_alias = (
    right if hasattr(_Round.apply, "__func__") else refused(r"_Round\.apply is called by another name")
)


@of_an_alias
class AliasOfAFunction(Base):
    def forward(self, x):
        for block in self.blocks:
            x = round_straight(block(x))
        return x


@of_an_alias
class AliasOfAFunctionFirst(Base):
    def make(self):
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x):
        return super().forward(round_straight(x * self.scale))


class Registered(nn.Linear):
    """Its subclasses must say a word, and are listed."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, word: str) -> None:
        assert word not in cls.kinds
        cls.kinds[word] = cls


class Block(Registered, word="block"):
    def __init__(self) -> None:
        super().__init__(D, D)


@right
class AsksForTheClass(Base):
    def make(self):
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        factors = {Block: 0.5, nn.Linear: 2.0}
        for block in self.blocks:
            x = block(x) * factors[type(block)] if type(block) is Block else block(x) * 2
        return x


class OwnCall(nn.Linear):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class OwnCallAgain(OwnCall):
    pass


@right
class OwnCallOfABase(Base):
    def make(self):
        self.blocks = nn.ModuleList([OwnCallAgain(D, D), OwnCall(D, D), nn.Linear(D, D)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + (1.0 if type(block) is OwnCall else 0.5)
        return x


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(gradients[0])
        return None, x.grad


@refused(r"_Held\(\) at .* is given a function that holds on to a tensor")
class FunctionWithAClosure(Base):
    def forward(self, x):
        mask = x.detach() > 0
        x = self.blocks[0](x)
        x = _Held.apply(lambda h: h * mask, x)
        return self.blocks[2](self.blocks[1](x))


@right
class CallsAnotherBlockFromABlock(Base):
    """By a list, so that it is no part of it. Both write its buffers, so they are in one stage."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return super().forward(input) + self.others[0](input)

        self.blocks = nn.ModuleList([nn.BatchNorm1d(D), nn.Linear(D, D), Block(D, D)])
        self.blocks[2].others = [self.blocks[0]]

    def forward(self, x):
        x = torch.cat([x, -x, x * 2, x + 1])
        return super().forward(x)[: len(x) // 4]


@refused(r"_Held\(\) at .* is given a function that calls module 'blocks\.1'")
class FunctionThatCallsABlock(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x = _Held.apply(lambda h, block=self.blocks[1]: block(h), x)
        return self.blocks[2](x)


@right
class FunctionWithAFunction(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x = _Held.apply(lambda h: torch.tanh(h) * 2, x)
        return self.blocks[2](self.blocks[1](x))


class Scaled(nn.Linear):
    """A block that takes any value and makes a number of it."""

    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, x, value):
        return super().forward(x) * (value(2) if callable(value) else getattr(value, "scale", value))


class TakesAValue(Base):
    def make(self):
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])

    def value(self, index: int) -> Any:
        return 1.0

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, self.value(index))
        return x


@right
class PassesNumpyNumbers(TakesAValue):
    def value(self, index):
        return np.linspace(0, 1, 3)[index] if index else np.int64(2)


@right
class PassesOptions(TakesAValue):
    def value(self, index):
        return types.SimpleNamespace(scale=index + 0.5, names={"a", "b"}, table={"x": [1, 2]})


@right
class PassesAFunctionOverADict(TakesAValue):
    def value(self, index):
        table = {2: index + 0.5}
        return lambda key: table[key]


@right
class PassesASet(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, skipped):
                return x if self.index in skipped else super().forward(x)

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for index, block in enumerate(self.blocks):
            block.index = index

    def forward(self, x):
        for block in self.blocks:
            x = block(x, {1})
        return x


@refused("changes a list, a dict or an object that it is given")
class FillsOptions(TakesAValue):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, options):
                options.scale += 1.0
                return super().forward(x) * options.scale

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        options = types.SimpleNamespace(scale=0.0)
        for block in self.blocks:
            x = block(x, options)
        return x


@dataclass
class _Scale:
    scale: Tensor
    name: str = "scale"


@right
class PassesADataclassWithATensor(TakesAValue):
    def value(self, index):
        return _Scale(self.blocks[index].bias.sum())


@refused("is given a SimpleNamespace")
class PassesOptionsWithATensor(TakesAValue):
    def value(self, index):
        return types.SimpleNamespace(scale=torch.tensor(1.0))


@refused("is given a function at")
class PassesAnIterator(TakesAValue):
    def forward(self, x):
        numbers = itertools.count(1)
        for block in self.blocks:
            x = block(x, lambda _: next(numbers))
        return x


@right
class ListOfParameters(Base):
    def make(self):
        self.scales = [nn.Parameter(torch.rand(D)) for _ in range(3)]

    def forward(self, x):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return x
