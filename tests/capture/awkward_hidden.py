# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Models whose numbers depend on what a replay does not see: globals, generators, clocks, modes, hooks."""

from __future__ import annotations

import itertools
import time
from contextvars import ContextVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.capture import other_file
from tests.capture.awkward_blocks import FACTOR, OfScaled
from tests.support.awkward import Base, D, refused, right

COUNTS = {"forwards": 0}
FOUND: ContextVar[torch.Tensor] = ContextVar("FOUND")
SETTINGS: ContextVar[dict[str, float]] = ContextVar("SETTINGS")
COLLECTED: ContextVar[dict[str, list[torch.Tensor]]] = ContextVar("COLLECTED")


@right
class BlocksShareAGrowingTable(Base):
    def make(self):
        class Positions(nn.Module):
            length = 0

            def forward(self, x):
                if x.shape[0] > self.length:
                    self.length = x.shape[0]
                    self.table = torch.arange(float(self.length))[:, None]
                return x + self.table[: x.shape[0]]

        class Block(nn.Linear):
            def forward(self, input):
                return self.positions(super().forward(input))

        positions = Positions()
        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])
        for block in self.blocks:
            block.positions = positions


@refused(r"sets awkward_hidden\.COUNTS\.forwards")
class CountsInAGlobal(Base):
    def forward(self, x):
        COUNTS["forwards"] += 1
        return super().forward(x) * COUNTS["forwards"]


@refused(r"mul\(\) at capture/awkward_hidden\.py:\d+ is given 1 in one forward and \d+ in the next one")
class CountsInAnIterator(Base):
    def make(self):
        self.numbers = itertools.count(1)

    def forward(self, x):
        return super().forward(x) * next(self.numbers)


@refused(r"mul\(\) at capture/awkward_hidden\.py:\d+ is given .* a clock")
class ReadsTheClock(Base):
    def forward(self, x):
        return super().forward(x) * (time.perf_counter() % 1)


@refused(r"draws from self\.noise")
class DrawsFromAGeneratorOfItsOwn(Base):
    def make(self):
        self.noise = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) * float(self.noise.random())


@refused(r"FACTOR\[''\] changes outside of the calls of that module")
class SetsAContextVariable(OfScaled):
    def forward(self, x):
        token = FACTOR.set(2.0)
        try:
            return super().forward(x)
        finally:
            FACTOR.reset(token)


@refused(r"SETTINGS\[''\] changes outside of the calls of that module")
class SetsAnObjectInAContextVariable(Base):
    """The blocks do without it, so that only its numbers tell."""

    def make(self):
        class Block(nn.Linear):
            def forward(self, input):
                return super().forward(input) * SETTINGS.get({}).get("scale", 1.0)

        self.blocks = nn.ModuleList([Block(D, D) for _ in range(3)])

    def forward(self, x):
        token = SETTINGS.set({"scale": 2.0})
        try:
            return super().forward(x)
        finally:
            SETTINGS.reset(token)


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


@refused(r"registers self\.table.* Register it in __init__")
class RegistersABuffer(Base):
    def forward(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.full((D,), 0.5))
        return super().forward(x) * self.table


@refused(r"data at capture/awkward_hidden\.py:\d+ changes the parameter 'followers\.0\.weight'")
class MovingAverageOfWeights(Base):
    def make(self):
        self.followers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)]).requires_grad_(False)

    def forward(self, x):
        for leader, follower in zip(self.blocks.parameters(), self.followers.parameters(), strict=True):
            follower.data = follower.data * 0.9 + leader.data * 0.1
        return super().forward(x) + self.followers[0](x)


@refused(r"requires_grad_\(\) at capture/awkward_hidden\.py:\d+ changes the parameter 'blocks\.1\.weight'")
class FreezesWithinTheForward(Base):
    def forward(self, x):
        self.blocks[1].requires_grad_(False)
        x = super().forward(x)
        self.blocks[1].requires_grad_(True)
        return x


@refused(r"weight of module 'blocks\.1' changes outside of the calls of that module")
class OtherWeights(Base):
    def forward(self, x):
        halved = {name: tensor * 0.5 for name, tensor in self.blocks[1].named_parameters()}
        return torch.func.functional_call(self.blocks[1], halved, (self.blocks[0](x),))


@refused(r"weight of module 'blocks\.1' changes outside of the calls of that module")
class OtherWeightsOfTheSameNumbers(Base):
    """An adapter that starts with zeros: the outputs are those of the block itself."""

    def make(self):
        self.down, self.up = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.zeros(2, D))

    def forward(self, x):
        x = self.blocks[0](x)
        adapted = {"weight": self.blocks[1].weight + self.down @ self.up}
        return self.blocks[2](torch.func.functional_call(self.blocks[1], adapted, (x,)))


@refused(r"register_hook\(\) at .* holds on to a tensor or an object of this forward")
class HookOverATensor(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        y = self.blocks[1](x)
        y.register_hook(lambda gradient: gradient * x.detach().abs())
        return self.blocks[2](y)


@refused(r"gives another gradient of 'blocks\.0\.weight' than the model")
class HooksOnSavedTensors(Base):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            x = torch.tanh(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](x))


@refused(r"gives other numbers than the model")
class ChoosesAKernel(Base):
    def forward(self, x):
        q, k, v = (block(x)[None, None] for block in self.blocks)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)[0, 0]


@right
class AsksWhetherGradientsAreEnabled(Base):
    def forward(self, x):
        x = super().forward(x)
        return x * 2 if torch.is_grad_enabled() else x


@right
class ReturnsAParameter(Base):
    def make(self):
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return torch.cat([super().forward(x) * self.scale, self.scale[None].expand(len(x), -1)], 1)


@refused(r"other_file\._STORE\.y changes outside of the calls")
class BlocksShareAStoreOfAnotherFile(Base):
    def make(self):
        class First(nn.Linear):
            def forward(self, input):
                other_file.put("y", input.detach().mean())
                return super().forward(input)

        class Last(nn.Linear):
            def forward(self, input):
                return super().forward(input) * other_file.get("y")

        self.blocks = nn.ModuleList([First(D, D), nn.Linear(D, D), Last(D, D)])


@refused(r"FOUND\[''\] changes outside of the calls of that module, in another one")
class BlocksShareAContextVariable(Base):
    def make(self):
        class First(nn.Linear):
            def forward(self, input):
                FOUND.set(input.detach().mean())
                return super().forward(input)

        class Last(nn.Linear):
            def forward(self, input):
                return super().forward(input) * FOUND.get()

        self.blocks = nn.ModuleList([First(D, D), nn.Linear(D, D), Last(D, D)])


@refused(r"leaves a value for others in self\.aux.*Return it with the output")
class LeavesALossForOthers(Base):
    def make(self):
        self.aux = torch.zeros(())

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        self.aux = x.pow(2).mean()
        return self.blocks[2](x)


@refused(r"item\(\) at .* reads a value that modules compute")
class LeavesANumberForOthers(Base):
    last = None

    def forward(self, x):
        x = super().forward(x)
        self.last = x.detach().mean().item()
        return x
