# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models that read values or sizes from tensors: of arguments, of draws, of buffers, of what modules compute."""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from torch import nn

from tests.support.awkward import Base, D, blocks, refused, refused_if, right


@right
class AsksTheArguments(Base):
    """Of which sizes depend, too: they are asked before the first layer."""

    def forward(self, x):
        kept, kinds = x[x[:, 0] > 0], (x * 2).round().long().unique()
        y = super().forward(x) * (2 if x.sum() > 0 else 3)
        return (y + kept.sum(0) / (kept.shape[0] + 1)) / (len(kinds) + 1)


@right
class AsksForNan(Base):
    """And for sizes of outputs that depend on no value; of others nobody asks the size."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if torch.isnan(x).any():
                raise ValueError("not a number")
            x = x.view(x.shape[0], -1) / x.size(1)
        return x + x[x > 0].sum() + torch.nonzero(x > 0).float().sum()


@refused("gave (True|False), and (True|False) when the model was recorded")
class IfBetweenBlocks(Base):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * 2 if (x.sum() * 1e4).long() % 2 == 0 else x * 3
        return x


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


class Draws(nn.Module):
    """The seeds of the micro-batches are those of the plain model if it drops all layers."""

    def __init__(self):
        super().__init__()
        self.inner = blocks(2)

    def forward(self, x):
        for block in self.inner:
            y = block(x)
            x = y if torch.rand([]) < 0.5 else y * 1.0
        return x


class Queue(Base):
    def make(self):
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.rand(16, D))

    def after(self, x):
        start = int(self.position)
        self.queue[start : start + len(x)] = x.detach()
        self.position.fill_((start + len(x)) % 16)
        return x + self.queue.mean(0)


refused(r"int\(\) at .* reads a value of a buffer that the forward writes")(Queue)


@refused(r"float\(\) at .* reads a value that modules compute: a replay would go on")
class ScalesByANumber(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x / float(x.detach().abs().max())))


@refused("move|Move")
class ScalesByAnArray(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        scale = torch.from_numpy(np.abs(x.detach().numpy()) + 1)
        return self.blocks[2](self.blocks[1](x / scale))


@refused(r"the size of a tensor made at capture/awkward_reads\.py:\d+ depends on values that modules compute")
class ExpertsWithoutTokens(Base):
    def make(self):
        self.router = nn.Linear(D, 3)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.blocks):
            at = (chosen == index).nonzero().flatten()
            if at.numel():
                y = y.index_add(0, at, expert(x[at]) * weights[at, None])
        return y


@right
class ReadsInParts(Base):
    """Parts that read values are left whole."""

    def make(self):
        self.parts = nn.ModuleList([kind() for kind in (Draws, Queue, ScalesByANumber, ScalesByAnArray)])

    def after(self, x):
        for part in self.parts:
            x = part(x)
        return x


@right
class ExpertsInAPart(Base):
    """One that calls modules for some samples only, too."""

    def make(self):
        self.blocks[1] = ExpertsWithoutTokens()


class Sign(Enum):
    LESS, MORE = -1, 1


@right
class ReturnsAValue(Base):
    """Blocks return a Python value beside their output, which the code between them computes with."""

    value = staticmethod(len)

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                y = super().forward(input)
                return y, value(y.detach())

        value = self.value
        self.blocks = blocks(kind=Block)

    def forward(self, x):
        for block in self.blocks:
            x, value = block(x)
            x = x * (value.value if isinstance(value, Enum) else value)
        return x


for _name, _found, _value in (
    ("ANumpyNumber", ".*", lambda y: np.float32(y.max())),
    ("AnEnum", "<Sign.*", lambda y: Sign.MORE if y.sum() > 0 else Sign.LESS),
):
    _message = rf"module 'blocks\.\d' gave {_found}, and {_found} when the model was recorded"
    refused_if(f"Returns{_name}", _message, ReturnsAValue, value=staticmethod(_value))


@refused(r"module 'blocks\.0' gave \[\d+, 6\], and \[\d+, 6\] when the model was recorded")
class SizesOfWhatABlockSelects(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x):
                return super().forward(x)[x[:, 0] > 0]

        self.blocks[0] = Block(D, D)

    def forward(self, x):
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)) + y.sum(0) / (len(y) + 1)
