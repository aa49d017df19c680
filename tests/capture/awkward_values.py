# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Models that keep Python values out of sight: in properties, slots, weak references, closures, caches by id."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.support.awkward import Base, D, refused, right

COUNTS: Any = weakref.WeakKeyDictionary()


class Slots:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Settings:
    scale: float = 1.0
    seen: list[int] = field(default_factory=list)


class Gained(nn.Linear):
    """A block whose state is behind a property."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self._gain = 1.0

    @property
    def gain(self) -> float:
        return self._gain

    @gain.setter
    def gain(self, value: float) -> None:
        self._gain = value

    def forward(self, input):
        return super().forward(input) * self.gain


class OfGained(Base):
    def make(self):
        self.blocks = nn.ModuleList([Gained() for _ in range(3)])


@right
class ReadsAProperty(OfGained):
    def forward(self, x):
        for block in self.blocks:
            x = block(x) * block.gain
        return x


@refused(r"_gain of module 'blocks\.1' changes outside of the calls")
class SetsAProperty(OfGained):
    def forward(self, x):
        self.blocks[1].gain *= 0.5
        return super().forward(x)


@refused(r"changes self\.slots")
class CountsInSlots(Base):
    def make(self):
        self.slots = Slots()

    def forward(self, x):
        self.slots.count += 1
        return super().forward(x) * self.slots.count


@refused(r"changes self\.settings")
class FillsADataclass(Base):
    def make(self):
        self.settings = Settings()

    def forward(self, x):
        self.settings.seen.append(len(x))
        return super().forward(x) * len(self.settings.seen)


@right
class BlocksFillDataclassesOfTheirOwn(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                self.settings.seen[:] = [*self.settings.seen, len(input)][-1:]
                self.settings.scale = 0.5
                return super().forward(input) * len(self.settings.seen) * self.settings.scale

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.settings = Settings()


@refused(r"module 'blocks\.[12]' changes outside of the calls")
class BlocksShareAWeakReference(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                self.shared().count += 1
                return super().forward(input) * self.shared().count

        self.slots = Slots()
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.shared = weakref.ref(self.slots)


@refused(r"COUNTS")
class CountsByWeakKeys(Base):
    def forward(self, x):
        COUNTS[self] = COUNTS.get(self, 0) + 1
        return super().forward(x) * COUNTS[self]


@refused(r"which a replay would not repeat|is given \d in one forward")
class CountsInAClosure(Base):
    def make(self):
        seen: list[int] = []

        def count() -> int:
            seen.append(1)
            return len(seen)

        self.count = count

    def forward(self, x):
        return super().forward(x) * self.count()


@refused(r"is given 1 in one forward and \d in the next one")
class CountsInAGenerator(Base):
    def make(self):
        self.numbers = (number for number in range(1, 10**6))

    def forward(self, x):
        return super().forward(x) * next(self.numbers)


@right
class WalksByAGenerator(Base):
    def steps(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            yield x

    def forward(self, x):
        return sum(self.steps(x))


@right
class CachesMasksByShape(Base):
    """What is set up once, and does not depend on values."""

    def make(self):
        self.masks: dict[Any, Any] = {}

    def forward(self, x):
        if x.shape not in self.masks:
            self.masks[x.shape] = torch.ones(x.shape[-1]).cumsum(0)
        return super().forward(x) * self.masks[x.shape]


@right
class CachesMasksInADefault(Base):
    def forward(self, x, masks={}):  # noqa: B006
        if x.shape[-1] not in masks:
            masks[x.shape[-1]] = torch.ones(x.shape[-1]).cumsum(0)
        return super().forward(x) * masks[x.shape[-1]]


@refused(r"reads again what it has set as")
class CachesValuesByShape(Base):
    def make(self):
        self.means: dict[Any, Any] = {}

    def forward(self, x):
        if x.shape not in self.means:
            self.means[x.shape] = x.detach().mean(0)
        return super().forward(x) * self.means[x.shape]


@right
class BlocksCacheById(Base):
    """A dict of each block, keyed by the id of the block's own weight."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                if id(self.weight) not in self.known:
                    self.known[id(self.weight)] = 0.5
                return super().forward(input) * self.known[id(self.weight)]

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.known = {}


@refused(r"changes outside of the calls")
class BlocksCountByIdInOneDict(Base):
    def make(self):
        known: dict[int, int] = {}

        class Block(nn.Linear):
            def forward(self, input):
                known[id(self)] = known.get(id(self), 0) + 1
                return super().forward(input) * known[id(self)]

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])


@refused(r"sets self\.count")
class CountsThroughItsDict(Base):
    count = 0

    def forward(self, x):
        vars(self)["count"] = self.count + 1
        return super().forward(x) * self.count
