# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models whose code is awkward: functions, hooks, control flow, writes in place, and what is passed to blocks."""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.awkward import Base, D, refused, refused_if, right


class _Double(torch.autograd.Function):
    """With a gradient that is not its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


@right
class Functions(Base):
    """In a block, and between blocks."""

    class Block(nn.Linear):
        def forward(self, input):
            return _Double.apply(super().forward(input))

    def forward(self, x):
        for block in self.blocks:
            x = _Double.apply(torch.tanh(block(x)))
        return x


double = _Double.apply
# Since torch 2.14 apply is no Python code, and calls of it by another name are not seen.
of_an_alias = (
    right if hasattr(_Double.apply, "__func__") else refused(r"_Double\.apply is called by another name")
)


@of_an_alias
class AliasOfAFunction(Base):
    def make(self):
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x):
        x = double(x * self.scale)
        for block in self.blocks:
            x = double(block(x))
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


@right
class FunctionWithAFunction(Base):
    def forward(self, x):
        mask = x.detach() > 0
        x = self.blocks[0](x)
        x = _Held.apply(self.function(mask), x)
        return self.blocks[2](self.blocks[1](x))

    def function(self, mask):
        return lambda h: torch.tanh(h) * 2


for _name, _message, _function in (
    ("FunctionWithAClosure", "holds on to a tensor", lambda self, mask: lambda h: h * mask),
    (
        "FunctionThatCallsABlock",
        r"calls module 'blocks\.1'",
        lambda self, mask: lambda h, block=self.blocks[1]: block(h),
    ),
):
    _message = rf"_Held\(\) at .* is given a function that {_message}"
    refused_if(_name, _message, FunctionWithAFunction, function=_function)


@right
class Hooks(Base):
    """On blocks, on the tensor between them, forward and backward."""

    def make(self):
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 3)
        for block in self.blocks[1:]:
            block.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))

    def forward(self, x):
        x = self.blocks[0](x)
        x.register_hook(lambda gradient: gradient * 2)
        return self.blocks[2](self.blocks[1](x))


@right
class Checkpoints(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return checkpoint(self.blocks[2], x, use_reentrant=True)


class Registered(nn.Linear):
    """Its subclasses must say a word, and are listed."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, word: str) -> None:
        assert word not in cls.kinds
        cls.kinds[word] = cls


class RegisteredBlock(Registered, word="block"):
    pass


class OwnCall(nn.Linear):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class OwnCallAgain(OwnCall):
    pass


@right
class AsksForTheClass(Base):
    """The call of some blocks is their own."""

    def make(self):
        self.blocks = nn.ModuleList([kind(D, D) for kind in (RegisteredBlock, OwnCallAgain, OwnCall)])

    def forward(self, x):
        factors = {RegisteredBlock: 0.5, nn.Linear: 2.0}
        for block in self.blocks:
            x = block(x) * factors.get(type(block), 2.0) + (1.0 if type(block) is OwnCall else 0.5)
        return x


@right
class AsksForRequiresGrad(Base):
    """Of a parameter, and of all: within a property of the block, which is read."""

    class Block(nn.Linear):
        factor = property(lambda self: 1.5 if self.weight.requires_grad else 0.5)

    def make(self):
        self.blocks[0].weight.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * (1 if block.weight.requires_grad else 2) * block.factor
        return x * 2 if torch.is_grad_enabled() else x


@right
class MethodOfBlock(Base):
    class Block(nn.Linear):
        def half(self, x):
            return F.linear(x, self.weight) / 2

    def forward(self, x):
        return self.blocks[2].half(self.blocks[1](self.blocks[0].forward(x)))


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


@right
class WalksByAGenerator(Base):
    def steps(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            yield x

    def forward(self, x):
        return sum(self.steps(x))


@right
class NoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), torch.jit.script(nn.Linear(D, D))
        self.gate = nn.Bilinear(D, D, D)

    def forward(self, x):
        y = self.first(x)
        return self.gate(self.second(y), x) + y


@refused("comes from nowhere")
class VmapBetween(Base):
    def after(self, x):
        return torch.vmap(lambda row: row * 2)(x)


@refused("module 'blocks.0' is called within a transform of torch.func")
class DerivativesOfBlocks(Base):
    def before(self, x):
        torch.func.jvp(self.blocks[0], (x,), (torch.ones_like(x),))


@right
class WritesBetween(Base):
    """Through a view, into the output of a block, into an argument, and by blocks themselves."""

    def make(self):
        for index in (0, 2):
            parts = nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D)
            self.blocks[index] = nn.Sequential(*parts)
        self.last = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.blocks[0](x)
        head = y[:, :2]
        z = self.blocks[1](y.clone())
        head.mul_(2)
        y[:, 3] = z[:, 1]
        with torch.no_grad():
            scale = torch.empty_like(y)
            torch.abs(y.detach(), out=scale)
        return self.last(self.blocks[2]((z + y) * scale) * 2)


@right
class AddsTheHalvesOfABlock(Base):
    """In place: the halves count their writes together."""

    class Block(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            both = torch.cat([y, 2 * y], dim=1)
            return both[:, :D], both[:, D:]

    def forward(self, x):
        for block in self.blocks:
            x, other = block(x)
            x += other
            x = torch.tanh(x)
        return x


@right
class Shapes(Base):
    def forward(self, x):
        rows, columns = x.shape
        x = self.blocks[0](x).view(rows, 2, columns // 2).transpose(1, 2)
        x = x.reshape(rows, -1) / x.size(-1) + torch.arange(columns, device=x.device)
        return self.blocks[2](self.blocks[1](x)).type(torch.float32)


@right
class LoopOverSizes(Base):
    def forward(self, x):
        rows = [self.blocks[0](row) for row in x.unbind(0)]
        return self.blocks[2](self.blocks[1](torch.stack(rows)))


@right
class ModesBetween(Base):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.blocks[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](x + frozen)
            x = x @ self.blocks[2].weight
        return self.blocks[2](x.float())


@right
class PicksAndScatters(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        best, where = x.topk(2, dim=1)
        y = torch.zeros_like(x).scatter_(1, where, best)
        y[:, where[0, 0]] += 1
        return self.blocks[2](self.blocks[1](y) + torch.where(x > 0, x, y))


@dataclass
class _Scale:
    scale: Tensor
    name: str = "scale"


@right
class NestsOfBlocks(Base):
    """Blocks take and return lists, and dataclasses of tensors."""

    class Block(nn.Linear):
        def forward(self, parts):
            made = [nn.Linear.forward(self, part.scale) for part in reversed(parts)]
            return [_Scale(one, parts[0].name) for one in made]

    def forward(self, x):
        parts = [_Scale(x), _Scale(x * 2)]
        for block in self.blocks:
            parts = block(parts)
        return torch.cat([part.scale for part in parts if part.name == "scale"], 1)


class TakesAValue(Base):
    """Blocks that take any value, and make a number or a function of it."""

    class Block(nn.Linear):
        def forward(self, x, value):
            y = super().forward(x)
            if isinstance(value, set):
                return x if 1 in value else y
            if callable(value):
                return value(y)
            return y * getattr(value, "scale", value)

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, self.value(index, x))
        return x


@right
class PassesValues(TakesAValue):
    """Numbers of numpy, an object, a dataclass with a tensor, functions of torch and over a dict, and sets."""

    def make(self):
        self.blocks.extend([self.Block(D, D) for _ in range(5)])

    def value(self, index, x):
        table = {2: index + 0.5}
        return (
            np.int64(2),
            np.linspace(0, 1, 3)[1],
            types.SimpleNamespace(scale=index + 0.5, names={"a", "b"}, table={"x": [1, 2]}),
            _Scale(self.blocks[index].bias.sum()),
            torch.tanh,
            lambda y: y * table[2],
            {1},
            {2},
        )[index]


_counter = itertools.count(1)
for _name, _what, _value in (
    ("AClosure", "a function", lambda self, index, x: lambda y: y + x),
    ("AnIterator", "a function at", lambda self, index, x: lambda y, numbers=_counter: y * next(numbers)),
    (
        "OptionsWithATensor",
        "a SimpleNamespace",
        lambda self, index, x: types.SimpleNamespace(scale=torch.tensor(1.0)),
    ),
):
    refused_if(f"Passes{_name}", f"is given {_what}", TakesAValue, value=_value)


@refused("changes a list, a dict or an object that it is given")
class FillsOptions(Base):
    class Block(nn.Linear):
        def forward(self, x, options):
            options.scale += 1.0
            return super().forward(x) * options.scale

    def options(self):
        return types.SimpleNamespace(scale=0.0)

    def forward(self, x):
        options = self.options()
        for block in self.blocks:
            x = block(x, options)
        return x


@refused("changes a list, a dict or an object that it is given")
class FillsAList(FillsOptions):
    options = list

    class Block(nn.Linear):
        def forward(self, x, options):
            options.append(x)
            return super().forward(x)
