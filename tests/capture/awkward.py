# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false
"""Small models whose forwards do what breaks tracers, each with what is expected of a pipeline: right, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

_D = 6


def _blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(_D, _D) for _ in range(count)])


class _Base(nn.Module):
    """Three blocks and a way to go through them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _blocks()
        self.make()

    def make(self) -> None:
        pass

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


RIGHT: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {}
_Kind = Callable[[type[nn.Module]], type[nn.Module]]


def right(kind: type[nn.Module]) -> type[nn.Module]:
    """Its gradients are those of the plain model."""
    RIGHT[kind.__name__] = kind
    return kind


def refused(message: str) -> _Kind:
    """It is refused with this message."""

    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        REFUSED[kind.__name__] = kind, message
        return kind

    return keep


@right
class FunctionBetweenBlocks(_Base):
    def forward(self, x):
        for block in self.blocks:
            x = _Double.apply(torch.tanh(block(x)))
        return x


@right
class FunctionInBlock(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return _Double.apply(super().forward(input))

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])


@right
class FullBackwardHook(_Base):
    def make(self):
        for block in self.blocks[1:]:
            block.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))


@right
class ForwardHook(_Base):
    def make(self):
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 3)


@right
class HookOnTensor(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x.register_hook(lambda gradient: gradient * 2)
        return self.blocks[2](self.blocks[1](x))


@right
class AsksForRequiresGrad(_Base):
    def make(self):
        self.blocks[0].weight.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * (1 if block.weight.requires_grad else 2)
        return x


@right
class CounterInBlock(_Base):
    def make(self):
        class Block(nn.Linear):
            calls = 0

            def forward(self, input):
                self.calls += 1
                return super().forward(input) * 0.5

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])


@refused(r"sets self.calls at capture/awkward.py:\d+")
class CounterBetweenBlocks(_Base):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * self.calls


@refused("changes self.seen")
class ListBetweenBlocks(_Base):
    def make(self):
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return super().forward(x) * len(self.seen)


@refused("sets self.state")
class BufferBoundAnew(_Base):
    def make(self):
        self.register_buffer("state", torch.ones(_D))

    def forward(self, x):
        self.state = self.state * 0.5
        return super().forward(x) * self.state


@right
class BufferBoundAnewInPart(_Base):
    def make(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = _blocks(2)
                self.register_buffer("state", torch.ones(_D))

            def forward(self, x):
                self.state = self.state * 0.5
                return self.inner[1](self.inner[0](x)) * self.state

        self.part = Part()
        self.last = nn.Linear(_D, _D)
        del self.blocks

    def forward(self, x):
        return self.last(self.part(x))


@right
class BufferWrittenInPlace(_Base):
    def make(self):
        self.register_buffer("state", torch.ones(_D))

    def forward(self, x):
        self.state.mul_(0.5)
        return super().forward(x) * self.state


@refused("random numbers of Python's random or of numpy")
class PythonRandom(_Base):
    def forward(self, x):
        return super().forward(x) * random.random()


@refused("random numbers of Python's random or of numpy")
class NumpyRandom(_Base):
    def forward(self, x):
        x = self.blocks[0](x) * float(np.random.rand())
        return self.blocks[1](x)


@right
class CheckpointBetween(_Base):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@right
class ReentrantCheckpoint(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@right
class IfInBlock(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return super().forward(input) * (2 if input.sum() > 0 else 3)

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])


@right
class IfOnArgument(_Base):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 3)


@refused("gave (True|False), and (True|False) when the model was recorded")
class IfBetweenBlocks(_Base):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * 2 if (x.sum() * 1e4).long() % 2 == 0 else x * 3
        return x


@right
class NumpyInBlock(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                scale = np.abs(input.detach().numpy()).max()
                return super().forward(input) / float(scale)

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])


@right
class NumpyInPart(_Base):
    def make(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = _blocks(2)

            def forward(self, x):
                scale = torch.from_numpy(np.abs(x.detach().numpy()) + 1)
                return self.inner[1](self.inner[0](x) / scale)

        self.part = Part()

    def forward(self, x):
        return self.part(super().forward(x))


@refused("move|Move")
class FromNumpyBetween(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        scale = torch.from_numpy(np.abs(x.detach().numpy()) + 1)
        return self.blocks[1](x / scale)


@refused("comes from nowhere")
class VmapBetween(_Base):
    def forward(self, x):
        return torch.vmap(lambda row: row * 2)(super().forward(x))


@right
class ViewWrittenLater(_Base):
    def forward(self, x):
        y = self.blocks[0](x)
        head = y[:, :2]
        z = self.blocks[1](y.clone())
        head.mul_(2)
        return self.blocks[2](z + y)


@right
class WriteIntoBlocksOutput(_Base):
    def forward(self, x):
        y = self.blocks[0](x)
        z = self.blocks[1](y * 1)
        y[:, 0] = z[:, 1]
        return self.blocks[2](y)


@right
class OutArgument(_Base):
    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            scale = torch.empty_like(x)
            torch.abs(x.detach(), out=scale)
        return self.blocks[2](x * scale)


@right
class InPlaceActivations(_Base):
    def make(self):
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(_D, _D), nn.ReLU(inplace=True), nn.Linear(_D, _D)) for _ in range(2)]
        )
        self.last = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.last(super().forward(x) * 2)


@right
class SharedBlock(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x = self.blocks[1](torch.tanh(x))
        return self.blocks[0](torch.tanh(x))


@right
class WeightUsedDirectly(_Base):
    def forward(self, x):
        return F.linear(super().forward(x), self.blocks[0].weight)


@right
class OwnParameters(_Base):
    def make(self):
        self.scale = nn.Parameter(torch.rand(_D))
        self.extra = nn.ParameterList([nn.Parameter(torch.rand(_D)) for _ in range(3)])

    def forward(self, x):
        x = x * self.scale
        for block, extra in zip(self.blocks, self.extra, strict=True):
            x = block(x) + extra
        return x * self.scale


@right
class MethodOfBlock(_Base):
    def make(self):
        class Block(nn.Linear):
            def half(self, x):
                return F.linear(x, self.weight) / 2

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        return self.blocks[2].half(self.blocks[1](self.blocks[0].forward(x)))


@right
class PlainTensors(_Base):
    def make(self):
        self.table = torch.rand(_D)
        self.tables = {"a": [torch.rand(_D), torch.rand(_D)]}

    def forward(self, x):
        return super().forward(x + self.table) * self.tables["a"][1]


@right
class KeepsOutputsAside(_Base):
    def make(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(_D, _D)

            def forward(self, x):
                self.aside = self.linear(x)
                return torch.tanh(self.aside)

        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = super().forward(x)
        return x + sum(block.aside.square() for block in self.blocks)


@right
class PassesLists(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, parts):
                return [super(Block, self).forward(part) for part in reversed(parts)]

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        parts = [x, x * 2]
        for block in self.blocks:
            parts = block(parts)
        return torch.cat(parts, 1)


@refused("changes a list or dict")
class FillsAList(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, seen):
                x = super().forward(x)
                seen.append(x)
                return x

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return x + seen[0]


@right
class Shapes(_Base):
    def forward(self, x):
        rows, columns = x.shape
        x = self.blocks[0](x).view(rows, 2, columns // 2).transpose(1, 2)
        x = x.reshape(rows, -1) / x.size(-1) + torch.arange(columns, device=x.device)
        return self.blocks[2](self.blocks[1](x))


@right
class LoopOverSizes(_Base):
    def forward(self, x):
        rows = [self.blocks[0](row) for row in x.unbind(0)]
        return self.blocks[2](self.blocks[1](torch.stack(rows)))


@right
class NoGradBetween(_Base):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x) + frozen)


@right
class DetachBetween(_Base):
    def forward(self, x):
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](y) + y.detach())


@right
class AutocastBetween(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](x)
            x = x @ self.blocks[2].weight
        return self.blocks[2](x.float())


@right
class Parametrized(_Base):
    def make(self):
        parametrizations.weight_norm(self.blocks[0])
        parametrizations.orthogonal(self.blocks[1])


@right
class Scripted(_Base):
    def make(self):
        self.blocks[1] = torch.jit.script(nn.Linear(_D, _D))


@right
class Frozen(_Base):
    def make(self):
        for block in self.blocks[:2]:
            block.requires_grad_(False)


@right
class Norms(_Base):
    def make(self):
        self.norm = nn.BatchNorm1d(_D)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(_D, _D), nn.BatchNorm1d(_D)) for _ in range(3)])

    def forward(self, x):
        return self.norm(super().forward(x))


@right
class OwnCall(_Base):
    def make(self):
        class Block(nn.Linear):
            def __call__(self, *args, **kwargs):
                return super().__call__(*args, **kwargs) * 2

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])


@right
class PicksAndScatters(_Base):
    def forward(self, x):
        x = self.blocks[0](x)
        best, where = x.topk(2, dim=1)
        y = torch.zeros_like(x).scatter_(1, where, best)
        y[:, where[0, 0]] += 1
        return self.blocks[2](self.blocks[1](y) + torch.where(x > 0, x, y))


@right
class ComplexNumbers(_Base):
    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](torch.fft.irfft(torch.fft.rfft(x) * 2, n=_D))


@right
class ManyOutputs(_Base):
    def make(self):
        @dataclass
        class Both:
            one: Tensor
            two: Tensor
            name: str

        class Block(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return Both(y, y * 2, "b")

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            both = block(x)
            x = both.one * both.two if both.name == "b" else both.one
        return x


@right
class NoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(_D, _D), nn.Linear(_D, _D)
        self.gate = nn.Bilinear(_D, _D, _D)

    def forward(self, x):
        y = self.first(x)
        return self.gate(self.second(y), x) + y


@right
class Recursive(_Base):
    def walk(self, x, depth):
        return x if depth == len(self.blocks) else self.walk(self.blocks[depth](x) + x, depth + 1)

    def forward(self, x):
        return self.walk(x, 0)


@refused("is given a function")
class PassesAClosure(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, then):
                return then(super().forward(x))

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        y = self.blocks[0](x, torch.tanh)
        return self.blocks[1](y, lambda one: one + y)


@right
class PassesAFunction(_Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, then):
                return then(super().forward(x))

        self.blocks = nn.ModuleList([Block(_D, _D) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, F.relu)
        return x.type(torch.float32)


@refused("reads again what it has set as self.memory")
class RemembersTheLastForward(_Base):
    memory = None

    def forward(self, x):
        x = super().forward(x)
        if self.memory is not None:
            x = x + self.memory.mean()
        self.memory = x.detach()
        return x
