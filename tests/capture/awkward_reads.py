# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models that read values from tensors between blocks: of draws, of buffers, of what modules compute."""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from torch import nn

from tests.support.awkward import Base, D, blocks, refused, right


@refused(r"reads a value that is drawn: .* Switch it off, as by layerdrop=0")
class DropsLayersByChance(Base):
    chance = 0.3

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) >= self.chance:
                x = block(x)
        return x


@right
class DropsNoLayers(DropsLayersByChance):
    chance = 0.0


@right
class DropsLayersInAPart(Base):
    """The part is left whole; the seeds of the micro-batches are those of the plain model if it drops all layers."""

    def make(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = blocks(2)

            def forward(self, x):
                for block in self.inner:
                    y = block(x)
                    x = y if torch.rand([]) < 0.5 else y * 1.0
                return x

        self.part = Part()

    def forward(self, x):
        return self.part(super().forward(x))


class Queue(Base):
    def make(self):
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.rand(16, D))

    def forward(self, x):
        x = super().forward(x)
        start = int(self.position)
        self.queue[start : start + len(x)] = x.detach()
        self.position.fill_((start + len(x)) % 16)
        return x + self.queue.mean(0)


refused(r"int\(\) at .* reads a value of a buffer that the forward writes")(Queue)


@right
class QueueInAPart(Base):
    def make(self):
        self.queue = Queue()
        self.queue.blocks = blocks(1)
        self.last = nn.Linear(D, D)

    def forward(self, x):
        return self.last(self.queue(super().forward(x)))


@refused(r"float\(\) at .* reads a value that modules compute: a replay would go on")
class ScalesByANumber(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x / float(x.detach().abs().max())))


@refused(r"item\(\) at .* reads a value that modules compute")
class BranchesOnANumber(Base):
    def forward(self, x):
        x = super().forward(x)
        return x * 2 if 2 * x.detach().abs().max().item() + 1 > 0 else x


@right
class ScalesByANumberInAPart(Base):
    def make(self):
        self.part = ScalesByANumber()

    def forward(self, x):
        return self.part(super().forward(x))


class Sign(Enum):
    LESS, MORE = -1, 1


class ReturnsAValue(Base):
    """Blocks return a Python value beside their output, which the code between them computes with."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                y = super().forward(input)
                return y, value(y.detach())

        value = self.value
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x, value = block(x)
            x = x * (value.value if isinstance(value, Enum) else value)
        return x


@right
class ReturnsASize(ReturnsAValue):
    value = staticmethod(len)


@refused(r"module 'blocks\.\d' gave .*, and .* when the model was recorded")
class ReturnsANumpyNumber(ReturnsAValue):
    value = staticmethod(lambda y: np.float32(y.max()))


@refused(r"module 'blocks\.\d' gave <Sign.*, and <Sign.* when the model was recorded")
class ReturnsAnEnum(ReturnsAValue):
    value = staticmethod(lambda y: Sign.MORE if y.sum() > 0 else Sign.LESS)


@right
class AsksForNan(Base):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if torch.isnan(x).any():
                raise ValueError("not a number")
        return x
