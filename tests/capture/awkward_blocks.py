# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Models whose blocks hold values that the code around them, or other blocks, read or change."""

from __future__ import annotations

import types
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tests.capture import other_file
from tests.support.awkward import Base, D, refused, refused_if, right

FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)
KEPT: dict[str, Any] = {}


class Scaled(nn.Linear):
    """A block whose numbers depend on all that it holds."""

    of_class = 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale: Any = 1.0
        self._gain = 1.0
        self.items, self.settings = [1.0], types.SimpleNamespace(factor=1.0)
        self.next: list[Any] = []

    @property
    def gain(self) -> float:
        return self._gain

    @gain.setter
    def gain(self, value: float) -> None:
        self._gain = value

    def forward(self, input):
        scale = self.scale * len(self.items) * self.settings.factor * self.of_class * self.gain * FACTOR.get()
        for block in self.next:
            block.scale = 2.0
        return super().forward(input) * scale


class OfScaled(Base):
    Block = Scaled


def _changes_settings(self, x):
    self.blocks[2].settings.factor *= 2


def _changes_a_property(self, x):
    self.blocks[1].gain *= 0.5


def _changes_the_class(self, x):
    Scaled.of_class = Scaled.of_class * 0.5


# What a model does to its blocks before it calls them.
for _name, _what, _act in (
    ("FillsAListOfABlock", r"items of module 'blocks\.1'", lambda self, x: self.blocks[1].items.append(0.0)),
    ("ChangesAnObjectOfABlock", r"settings of module 'blocks\.2'", _changes_settings),
    ("SetsAProperty", r"_gain of module 'blocks\.1'", _changes_a_property),
    ("ChangesTheClassOfBlocks", r"Scaled\.of_class", _changes_the_class),
    ("SetsTheModeOfABlock", r"training of module 'blocks\.1'", lambda self, x: self.blocks[1].eval()),
):
    refused_if(_name, f"{_what} changes outside of the calls", OfScaled, before=_act)


@refused(r"scale of module 'blocks\.0' changes outside of the calls of that module")
class SetsAnAttributeOfBlocks(OfScaled):
    def forward(self, x):
        for block in self.blocks:
            block.scale = block.scale + 1.0
            x = block(x)
        return x


@refused(r"scale of module 'blocks\.1\.0' changes outside of the calls")
class SetsATensorInsideABlock(Base):
    def Block(self, *sizes):
        return nn.Sequential(Scaled(*sizes), nn.Tanh())

    def before(self, x):
        self.blocks[1].get_submodule("0").scale = x.detach().mean()


@refused(r"scale of module 'blocks\.1' changes outside of the calls .*: another micro-batch may be between")
class BlockSetsTheNextOne(OfScaled):
    def make(self):
        self.blocks[0].next = [self.blocks[1]]


class OfAMemo(Base):
    """Blocks that share an object with the model."""

    class Block(nn.Linear):
        def forward(self, input):
            return super().forward(input) * self.memo.scale

    def make(self):
        self.memo = types.SimpleNamespace(scale=1.0, count=0, seen=0, mean=None, table={})
        for index, block in enumerate(self.blocks):
            block.memo, block.first = self.memo, not index


# A replay would not set it, though no forward but the first one changes it.
refused_if(
    "SetsTheSameForBlocksEachTime",
    r"memo of module 'blocks\.0' changes outside of the calls of that module",
    OfAMemo,
    before=lambda self, x: setattr(self.memo, "scale", 2.0),
)


@right
class SetsWhatNoBlockReads(OfAMemo):
    def before(self, x):
        self.memo.seen = x.shape[0]


@refused(r"memo of module 'blocks\.1' changes outside of the calls")
class PutsBackWhatBlocksCount(OfAMemo):
    class Block(nn.Linear):
        def forward(self, input):
            self.memo.count += 1
            return super().forward(input) * self.memo.count

    def after(self, x):
        self.memo.count = 0
        return x


@refused(r"memo of module 'blocks\.1' changes outside of the calls of that module, in another one")
class BlocksShareAMemo(OfAMemo):
    class Block(nn.Linear):
        def forward(self, input):
            if self.first:
                self.memo.mean = input.detach().mean()
            return super().forward(input) * self.memo.mean


@refused(r"memo\.table of module 'blocks\.0' changes outside of the calls of that module")
class FillsATableForBlocks(OfAMemo):
    class Block(nn.Linear):
        def forward(self, input):
            return super().forward(input) * self.memo.table[input.shape[0]]

    def before(self, x):
        self.memo.table.setdefault(x.shape[0], 2.0)


class Stores(nn.Linear):
    def forward(self, input):
        y = super().forward(input)
        if self.first:
            KEPT["mean"] = y.detach().mean()
        return y * KEPT["mean"]


@refused(r"KEPT\.mean changes outside of the calls of that module, in another one")
class BlocksShareAGlobalThatTheirBaseClassUses(OfAMemo):
    class Block(Stores):
        def forward(self, input):
            return super().forward(input) + 0.1


class First(nn.Linear):
    def forward(self, input):
        other_file.put("y", input.detach().mean())
        return super().forward(input)


class LastByStore(nn.Linear):
    def forward(self, input):
        return super().forward(input) * other_file.get("y")


class LastByModule(nn.Linear):
    def forward(self, input):
        return super().forward(input) + self.others[0].last.mean()


class Remembers(nn.Linear):
    """A block that changes what it holds in each call, and uses it itself."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls, self.last, self.mean = 0, None, torch.zeros(D)

    def forward(self, input):
        y = super().forward(input)
        self.calls, self.last = self.calls + 1, y.detach()
        self.mean.lerp_(self.last.mean(0), 0.5)
        return y * self.calls + self.mean


# What the first block leaves, the last one reads.
for _name, _what, _first, _last in (
    ("BlocksShareAStoreOfAnotherFile", r"other_file\._STORE\.y", First, LastByStore),
    # By a list, so that it is no part of it.
    ("ReadsAnotherBlockFromABlock", r"others\[0\] of module 'blocks\.2'", Remembers, LastByModule),
):

    def _make(self, first=_first, last=_last):
        self.blocks = nn.ModuleList([first(D, D), nn.Linear(D, D), last(D, D)])
        self.blocks[2].others = [self.blocks[0]]

    refused_if(_name, f"{_what} changes outside of the calls of that module, in another one", make=_make)


class OfRemembers(Base):
    """Right without recompute, which runs a forward twice."""

    Block = Remembers


class CallsABlockThatCountsTwice(OfRemembers):
    """Both calls are in one stage."""

    def after(self, x):
        return self.blocks[1](torch.tanh(x))


class NamesAnAttributeOfItsOwnAsBlocksDo(OfRemembers):
    calls = 2

    def after(self, x):
        return x * self.calls


@refused(r"last of module 'blocks\.0' changes in the calls of that module and is read outside of them")
class ReadsTheLastOutputOfABlock(OfRemembers):
    def forward(self, x):
        last = self.blocks[0].last
        x = super().forward(x)
        return x if last is None else x + last.mean()


for _name, _what, _read in (
    ("ReadsANumberThatABlockCounts", "calls", lambda self, x: x * (1 + self.blocks[1].calls)),
    ("ReadsATensorThatABlockWrites", "mean", lambda self, x: x + self.blocks[0].mean),
):
    _message = (
        f"{_what} of module 'blocks\\.0' changes in the calls of that module and is read outside of them"
    )
    refused_if(_name, _message, OfRemembers, after=_read)
