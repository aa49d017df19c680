# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models whose blocks hold values that the code around them, or other blocks, read or change."""

from __future__ import annotations

import random
import types
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.awkward import Base, D, refused, right

FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)
KEPT: dict[str, Any] = {}


class Scaled(nn.Linear):
    """A block whose numbers depend on all that it holds."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__(D, D)
        self.scale: Any = 1.0
        self.items, self.settings = [1.0], types.SimpleNamespace(factor=1.0)
        self.next: list[Any] = []

    def forward(self, input):
        scale = self.scale * len(self.items) * self.settings.factor * self.of_class * FACTOR.get()
        for block in self.next:
            block.scale = 2.0
        return super().forward(input) * scale


class OfScaled(Base):
    """Blocks whose numbers depend on what they hold."""

    def make(self):
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])


@refused(r"scale of module 'blocks\.0' changes outside of the calls of that module")
class SetsAnAttributeOfBlocks(OfScaled):
    def forward(self, x):
        for block in self.blocks:
            block.scale = block.scale + 1.0
            x = block(x)
        return x


@refused(r"scale of module 'blocks\.1\.0' changes outside of the calls")
class SetsATensorInsideABlock(Base):
    def make(self):
        self.blocks = nn.ModuleList([nn.Sequential(Scaled(), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        self.blocks[1].get_submodule("0").scale = x.detach().mean()
        return super().forward(x)


@refused(r"items of module 'blocks\.1' changes outside of the calls")
class FillsAListOfABlock(OfScaled):
    def forward(self, x):
        self.blocks[1].items.append(0.0)
        return super().forward(x)


@refused(r"settings of module 'blocks\.2' changes outside of the calls")
class ChangesAnObjectOfABlock(OfScaled):
    def forward(self, x):
        self.blocks[2].settings.factor *= 2
        return super().forward(x)


@refused(r"Scaled\.of_class changes outside of the calls of that module")
class ChangesTheClassOfBlocks(OfScaled):
    def forward(self, x):
        Scaled.of_class = Scaled.of_class * 0.5
        return super().forward(x)


@refused(r"training of module 'blocks\.1' changes outside of the calls")
class SetsTheModeOfABlock(Base):
    def forward(self, x):
        self.blocks[1].eval()
        return super().forward(x)


@refused(r"scale of module 'blocks\.1' changes outside of the calls .*: another micro-batch may be between")
class BlockSetsTheNextOne(OfScaled):
    def make(self):
        super().make()
        self.blocks[0].next = [self.blocks[1]]


@refused(r"memo of module 'blocks\.1' changes outside of the calls")
class PutsBackWhatBlocksCount(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                self.memo.count += 1
                return super().forward(input) * self.memo.count

        self.memo = types.SimpleNamespace(count=0)
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.memo = self.memo

    def forward(self, x):
        x = super().forward(x)
        self.memo.count = 0
        return x


@refused(r"memo of module 'blocks\.1' changes outside of the calls of that module, in another one")
class BlocksShareAMemo(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                if self.first:
                    self.memo.mean = input.detach().mean()
                return super().forward(input) * self.memo.mean

        memo = types.SimpleNamespace(mean=None)
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for index, block in enumerate(self.blocks):
            block.memo, block.first = memo, not index


class OfAMemo(Base):
    """Blocks that share an object with the model."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return super().forward(input) * self.memo.scale

        self.memo = types.SimpleNamespace(scale=1.0, seen=0)
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.memo = self.memo


@refused(r"memo of module 'blocks\.0' changes outside of the calls of that module")
class SetsTheSameForBlocksEachTime(OfAMemo):
    """A replay would not set it, though no forward but the first one changes it."""

    def forward(self, x):
        self.memo.scale = 2.0
        return super().forward(x)


@right
class SetsWhatNoBlockReads(OfAMemo):
    def forward(self, x):
        self.memo.seen = x.shape[0]
        return super().forward(x)


@refused(r"memo of module 'blocks\.0' changes outside of the calls of that module")
class FillsATableForBlocks(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return super().forward(input) * self.memo[input.shape[0]]

        self.memo = {}
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.memo = self.memo

    def forward(self, x):
        self.memo.setdefault(x.shape[0], 2.0)
        return super().forward(x)


class Stores(nn.Linear):
    def forward(self, input):
        y = super().forward(input)
        if self.first:
            KEPT["mean"] = y.detach().mean()
        return y * KEPT["mean"]


@refused(r"KEPT\.mean changes outside of the calls of that module, in another one")
class BlocksShareAGlobalThatTheirBaseClassUses(Base):
    def make(self):
        class Block(Stores):
            def forward(self, input):
                return super().forward(input) + 0.1

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for index, block in enumerate(self.blocks):
            block.first = not index


class Remembers(nn.Linear):
    """A block that changes what it holds in each call, and uses it itself."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.calls, self.last, self.mean = 0, None, torch.zeros(D)

    def forward(self, input):
        y = super().forward(input)
        self.calls, self.last = self.calls + 1, y.detach()
        self.mean.lerp_(self.last.mean(0), 0.5)
        return y * self.calls + self.mean


class OfRemembers(Base):
    """Right without recompute, which runs a forward twice."""

    def make(self):
        self.blocks = nn.ModuleList([Remembers() for _ in range(3)])


@refused(r"calls of module 'blocks\.0' changes in the calls of that module and is read outside of them")
class ReadsANumberThatABlockCounts(OfRemembers):
    def forward(self, x):
        return super().forward(x) * (1 + self.blocks[1].calls)


@refused(r"last of module 'blocks\.0' changes in the calls of that module and is read outside of them")
class ReadsTheLastOutputOfABlock(OfRemembers):
    def forward(self, x):
        last = self.blocks[0].last
        x = super().forward(x)
        return x if last is None else x + last.mean()


@refused(r"mean of module 'blocks\.0' changes in the calls of that module and is read outside of them")
class ReadsATensorThatABlockWrites(OfRemembers):
    def forward(self, x):
        return super().forward(x) + self.blocks[0].mean


class CallsABlockThatCountsTwice(OfRemembers):
    """Both calls are in one stage."""

    def forward(self, x):
        return self.blocks[1](torch.tanh(super().forward(x)))


class NamesAnAttributeOfItsOwnAsBlocksDo(OfRemembers):
    calls = 2

    def forward(self, x):
        return super().forward(x) * self.calls


class _Hook:
    """Counts its calls. Before the first one, the object itself holds nothing."""

    calls = 0

    def __call__(self, module, args, output):
        self.calls += 1
        return output * self.calls


@refused(r"hook of module 'blocks\.[12]' changes outside of the calls of that module")
class BlocksHaveOneHook(Base):
    def make(self):
        hook = _Hook()
        for block in self.blocks:
            block.register_forward_hook(hook)


@refused(r"use\.__self__ of module 'blocks\.2' changes outside of the calls of that module")
class HooksThatAreMethods(Base):
    """What the hook of one block leaves on the model, the hook of another one reads."""

    mean = None

    def make(self):
        self.blocks[0].register_forward_hook(self.keep)
        self.blocks[2].register_forward_hook(self.use)

    def keep(self, module, args, output):
        self.mean = output.detach().mean()

    def use(self, module, args, output):
        return output * self.mean


@refused(r"others\[0\] of module 'blocks\.2' changes outside of the calls of that module, in another one")
class ReadsAnotherBlockFromABlock(OfRemembers):
    """By a list, so that it is no part of it."""

    def make(self):
        class Reads(nn.Linear):
            def forward(self, input):
                return super().forward(input) + self.others[0].last.mean()

        self.blocks = nn.ModuleList([Remembers(), nn.Linear(D, D), Reads(D, D)])
        self.blocks[2].others = [self.blocks[0]]


class BlocksCountForThemselves(Base):
    """Right without recompute, which runs a forward twice."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                self.seen.append(len(self.seen))
                self.memo.count += 1
                scale = (
                    self.random.random() * float(self.numpy.random()) * torch.rand(1, generator=self.torch)
                )
                return super().forward(input) * scale * self.memo.count * len(self.seen)

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.seen, block.memo = [], types.SimpleNamespace(count=0)
            block.random, block.numpy = random.Random(1), np.random.default_rng(1)
            block.torch = torch.Generator().manual_seed(1)
