# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Models whose blocks share an object: a hook, what a weak reference or an id leads to, or a context variable."""

from __future__ import annotations

import random
import types
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tests.capture.awkward_blocks import FACTOR, OfScaled
from tests.support.awkward import Base, blocks, refused, right

COLLECTED: ContextVar[dict[str, list[torch.Tensor]]] = ContextVar("COLLECTED")


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


@dataclass
class Settings:
    scale: float = 1.0
    seen: list[int] = field(default_factory=list)


class Slots:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


@refused(r"module 'blocks\.[12]' changes outside of the calls")
class BlocksShareAWeakReference(Base):
    class Block(nn.Linear):
        def forward(self, input):
            self.shared().count += 1
            return super().forward(input) * self.shared().count

    def make(self):
        self.slots = Slots()
        for block in self.blocks:
            block.shared = weakref.ref(self.slots)


@refused(r"changes outside of the calls")
class BlocksCountByIdInOneDict(Base):
    def make(self):
        known: dict[int, int] = {}

        class Block(nn.Linear):
            def forward(self, input):
                known[id(self)] = known.get(id(self), 0) + 1
                return super().forward(input) * known[id(self)]

        self.blocks = blocks(kind=Block)


@refused(r"FACTOR\[''\] changes outside of the calls of that module")
class SetsAContextVariable(OfScaled):
    def forward(self, x):
        token = FACTOR.set(2.0)
        try:
            return super().forward(x)
        finally:
            FACTOR.reset(token)


@right
class CollectsOutputsInAContextVariable(Base):
    """As libraries do, by hooks on the blocks."""

    def make(self):
        def collect(module, args, output):
            if (found := COLLECTED.get(None)) is not None:
                found["outputs"].append(output)

        for block in self.blocks:
            block.register_forward_hook(collect)

    def forward(self, x):
        found = {"outputs": []}
        token = COLLECTED.set(found)
        try:
            x = super().forward(x)
        finally:
            COLLECTED.reset(token)
        return x + sum(found["outputs"])


class BlocksCountForThemselves(Base):
    """Right without recompute, which runs a forward twice."""

    class Block(nn.Linear):
        def forward(self, input):
            self.seen.append(len(self.seen))
            self.memo.count += 1
            scale = self.random.random() * float(self.numpy.random()) * torch.rand(1, generator=self.torch)
            return super().forward(input) * scale * self.memo.count * len(self.seen)

    def make(self):
        for block in self.blocks:
            block.seen, block.memo = [], types.SimpleNamespace(count=0)
            block.random, block.numpy = random.Random(1), np.random.default_rng(1)
            block.torch = torch.Generator().manual_seed(1)


@right
class BlocksShareAGrowingTable(Base):
    class Block(nn.Linear):
        def forward(self, input):
            return self.positions(super().forward(input))

    def make(self):
        class Positions(nn.Module):
            length = 0

            def forward(self, x):
                if x.shape[0] > self.length:
                    self.length = x.shape[0]
                    self.table = torch.arange(float(self.length))[:, None]
                return x + self.table[: x.shape[0]]

        positions = Positions()
        for block in self.blocks:
            block.positions = positions


@right
class BlocksKeepWhatIsTheirOwn(Base):
    """A dict keyed by the id of the block's own weight, and an object that each call fills."""

    class Block(nn.Linear):
        def forward(self, input):
            known = self.known.setdefault(id(self.weight), 0.5)
            self.settings.seen[:] = [*self.settings.seen, len(input)][-1:]
            self.settings.scale = 0.5
            return super().forward(input) * known * len(self.settings.seen) * self.settings.scale

    def make(self):
        for block in self.blocks:
            block.known, block.settings = {}, Settings()


@right
class KeepsOutputsAside(Base):
    class Block(nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            self.linear = nn.Linear(*sizes)

        def forward(self, x):
            self.aside = self.linear(x)
            return torch.tanh(self.aside)

    def after(self, x):
        return x + sum(block.aside.square() for block in self.blocks)
