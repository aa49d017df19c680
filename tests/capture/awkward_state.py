# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false
"""Models whose state is awkward: counters, lists, buffers, draws, and writes in place."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.awkward import Base, D, blocks, refused, right


@right
class AsksForRequiresGrad(Base):
    def make(self):
        self.blocks[0].weight.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * (1 if block.weight.requires_grad else 2)
        return x


@refused(r"sets self\.calls")
class CounterBetweenBlocks(Base):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * self.calls


@refused("changes self.seen")
class ListBetweenBlocks(Base):
    def make(self):
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return super().forward(x) * len(self.seen)


@refused("sets self.state")
class BufferBoundAnew(Base):
    def make(self):
        self.register_buffer("state", torch.ones(D))

    def forward(self, x):
        self.state = self.state * 0.5
        return super().forward(x) * self.state


@right
class BufferBoundAnewInPart(Base):
    def make(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = blocks(2)
                self.register_buffer("state", torch.ones(D))

            def forward(self, x):
                self.state = self.state * 0.5
                return self.inner[1](self.inner[0](x)) * self.state

        self.part = Part()
        self.last = nn.Linear(D, D)
        del self.blocks

    def forward(self, x):
        return self.last(self.part(x))


@right
class BufferWrittenInPlace(Base):
    def make(self):
        self.register_buffer("state", torch.ones(D))

    def forward(self, x):
        self.state.mul_(0.5)
        return super().forward(x) * self.state


@refused("random numbers of Python's random or of numpy")
class PythonRandom(Base):
    def forward(self, x):
        return super().forward(x) * random.random()


@refused("random numbers of Python's random or of numpy")
class NumpyRandom(Base):
    def forward(self, x):
        x = self.blocks[0](x) * float(np.random.rand())
        return self.blocks[1](x)


@right
class ViewWrittenLater(Base):
    def forward(self, x):
        y = self.blocks[0](x)
        head = y[:, :2]
        z = self.blocks[1](y.clone())
        head.mul_(2)
        return self.blocks[2](z + y)


@right
class WriteIntoBlocksOutput(Base):
    def forward(self, x):
        y = self.blocks[0](x)
        z = self.blocks[1](y * 1)
        y[:, 0] = z[:, 1]
        return self.blocks[2](y)


@right
class OutArgument(Base):
    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            scale = torch.empty_like(x)
            torch.abs(x.detach(), out=scale)
        return self.blocks[2](x * scale)


@right
class InPlaceActivations(Base):
    def make(self):
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D)) for _ in range(2)]
        )
        self.last = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.last(super().forward(x) * 2)


@right
class WeightUsedDirectly(Base):
    def forward(self, x):
        return F.linear(super().forward(x), self.blocks[0].weight)


@right
class OwnParameters(Base):
    def make(self):
        self.scale = nn.Parameter(torch.rand(D))
        self.extra = nn.ParameterList([nn.Parameter(torch.rand(D)) for _ in range(3)])

    def forward(self, x):
        x = x * self.scale
        for block, extra in zip(self.blocks, self.extra, strict=True):
            x = block(x) + extra
        return x * self.scale


@right
class PlainTensors(Base):
    def make(self):
        self.table = torch.rand(D)
        self.tables = {"a": [torch.rand(D), torch.rand(D)]}

    def forward(self, x):
        return super().forward(x + self.table) * self.tables["a"][1]


@right
class KeepsOutputsAside(Base):
    def make(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(D, D)

            def forward(self, x):
                self.aside = self.linear(x)
                return torch.tanh(self.aside)

        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = super().forward(x)
        return x + sum(block.aside.square() for block in self.blocks)


@refused("changes a list, a dict or an object")
class FillsAList(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x, seen):
                x = super().forward(x)
                seen.append(x)
                return x

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return x + seen[0]


@right
class Parametrized(Base):
    def make(self):
        parametrizations.weight_norm(self.blocks[0])
        parametrizations.orthogonal(self.blocks[1])


@refused("reads again what it has set as self.memory")
class ReadsTheLastForwardInPlaceOfADefault(Base):
    memory = None

    def make(self):
        self.default = torch.ones(D)

    def forward(self, x):
        x = super().forward(x) * (self.default if self.memory is None else self.memory)
        self.memory = x.detach().mean(0)
        return x


@refused("reads again what it has set as self.memory")
class ReadsTheLastForwardInPlaceOfItsOutput(Base):
    memory = None

    def forward(self, x):
        x = super().forward(x)
        x = x * (x if self.memory is None else self.memory)
        self.memory = x.detach()
        return x


@refused("reads again what it has set as self.memory")
class RemembersTheLastForward(Base):
    memory = None

    def forward(self, x):
        x = super().forward(x)
        if self.memory is not None:
            x = x + self.memory.mean()
        self.memory = x.detach()
        return x
