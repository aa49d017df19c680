# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false
"""Models whose code is awkward: functions, hooks, control flow, conversions, and what goes between blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.awkward import Base, D, blocks, refused, right


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


@right
class FunctionBetweenBlocks(Base):
    def forward(self, x):
        for block in self.blocks:
            x = _Double.apply(torch.tanh(block(x)))
        return x


@right
class FunctionInBlock(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return _Double.apply(super().forward(input))

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])


@right
class FullBackwardHook(Base):
    def make(self):
        for block in self.blocks[1:]:
            block.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))


@right
class ForwardHook(Base):
    def make(self):
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 3)


@right
class HookOnTensor(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        x.register_hook(lambda gradient: gradient * 2)
        return self.blocks[2](self.blocks[1](x))


@right
class CheckpointBetween(Base):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@right
class ReentrantCheckpoint(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@right
class IfOnArgument(Base):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 3)


@refused("gave (True|False), and (True|False) when the model was recorded")
class IfBetweenBlocks(Base):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * 2 if (x.sum() * 1e4).long() % 2 == 0 else x * 3
        return x


@right
class NumpyInPart(Base):
    def make(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = blocks(2)

            def forward(self, x):
                scale = torch.from_numpy(np.abs(x.detach().numpy()) + 1)
                return self.inner[1](self.inner[0](x) / scale)

        self.part = Part()

    def forward(self, x):
        return self.part(super().forward(x))


@refused("move|Move")
class FromNumpyBetween(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        scale = torch.from_numpy(np.abs(x.detach().numpy()) + 1)
        return self.blocks[1](x / scale)


@refused("comes from nowhere")
class VmapBetween(Base):
    def forward(self, x):
        return torch.vmap(lambda row: row * 2)(super().forward(x))


@right
class MethodOfBlock(Base):
    def make(self):
        class Block(nn.Linear):
            def half(self, x):
                return F.linear(x, self.weight) / 2

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        return self.blocks[2].half(self.blocks[1](self.blocks[0].forward(x)))


@right
class PassesLists(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, parts):
                return [super(Block, self).forward(part) for part in reversed(parts)]

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        parts = [x, x * 2]
        for block in self.blocks:
            parts = block(parts)
        return torch.cat(parts, 1)


@right
class Shapes(Base):
    def forward(self, x):
        rows, columns = x.shape
        x = self.blocks[0](x).view(rows, 2, columns // 2).transpose(1, 2)
        x = x.reshape(rows, -1) / x.size(-1) + torch.arange(columns, device=x.device)
        return self.blocks[2](self.blocks[1](x))


@right
class LoopOverSizes(Base):
    def forward(self, x):
        rows = [self.blocks[0](row) for row in x.unbind(0)]
        return self.blocks[2](self.blocks[1](torch.stack(rows)))


@right
class NoGradBetween(Base):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x) + frozen)


@right
class AutocastBetween(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](x)
            x = x @ self.blocks[2].weight
        return self.blocks[2](x.float())


@right
class Scripted(Base):
    def make(self):
        self.blocks[1] = torch.jit.script(nn.Linear(D, D))


@right
class PicksAndScatters(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        best, where = x.topk(2, dim=1)
        y = torch.zeros_like(x).scatter_(1, where, best)
        y[:, where[0, 0]] += 1
        return self.blocks[2](self.blocks[1](y) + torch.where(x > 0, x, y))


@right
class ManyOutputs(Base):
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

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            both = block(x)
            x = both.one * both.two if both.name == "b" else both.one
        return x


@right
class NoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.gate = nn.Bilinear(D, D, D)

    def forward(self, x):
        y = self.first(x)
        return self.gate(self.second(y), x) + y


class TakesAFunction(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, then):
                return then(super().forward(x))

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])


@refused("is given a function")
class PassesAClosure(TakesAFunction):
    def forward(self, x):
        y = self.blocks[0](x, torch.tanh)
        return self.blocks[1](y, lambda one: one + y)


@right
class PassesAFunction(TakesAFunction):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, F.relu)
        return x.type(torch.float32)
