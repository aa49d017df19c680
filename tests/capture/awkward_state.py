# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
"""Models whose own state is awkward: counters, draws, caches, clocks, buffers, weights, and what autograd keeps."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.capture.awkward_blocks_shared import Settings, Slots
from tests.support.awkward import Base, D, blocks, refused, refused_if, right

COUNTS: Any = weakref.WeakKeyDictionary()
FORWARDS = {"count": 0}


def _slots(self, x):
    self.held.count += 1
    return x * self.held.count


def _dataclass(self, x):
    self.held.seen.append(len(x))
    return x * len(self.held.seen)


def _weak_keys(self, x):
    COUNTS[self] = COUNTS.get(self, 0) + 1
    return x * COUNTS[self]


def _attribute(self, x):
    self.count = self.count + 1
    return x * self.count


def _global(self, x):
    FORWARDS["count"] += 1
    return x * FORWARDS["count"]


def _closure() -> Callable[[], int]:
    seen: list[int] = []

    def count() -> int:
        seen.append(1)
        return len(seen)

    return count


def _seeded(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x * torch.rand(x.shape)


AT = r"mul\(\) at capture/awkward_state\.py:\d+ "
RANDOM = "random numbers of Python's random or of numpy"
# What a model holds, and what it does after its blocks.
for _name, _message, _hold, _after in (
    ("CountsInAnAttribute", r"sets self\.count", None, _attribute),
    ("CountsInSlots", r"changes self\.held", Slots, _slots),
    ("CountsInADataclass", r"changes self\.held", Settings, _dataclass),
    ("CountsInAGlobal", r"sets awkward_state\.FORWARDS\.count", None, _global),
    ("CountsByWeakKeys", "COUNTS", None, _weak_keys),
    (
        "CountsInAClosure",
        r"which a replay would not repeat|is given \d in one forward",
        _closure,
        lambda self, x: x * self.held(),
    ),
    (
        "CountsInAnIterator",
        AT + r"is given 1 in one forward and \d+ in the next one",
        itertools.count,
        lambda self, x: x * (1 + next(self.held)),
    ),
    ("ReadsTheClock", AT + r"is given .* a clock", None, lambda self, x: x * (time.perf_counter() % 1)),
    ("DrawsFromPython", RANDOM, None, lambda self, x: x * random.random()),
    ("DrawsFromNumpy", RANDOM, None, lambda self, x: x * float(np.random.rand())),
    (
        "DrawsFromAGeneratorOfItsOwn",
        r"draws from self\.held",
        lambda: np.random.default_rng(0),
        lambda self, x: x * float(self.held.random()),
    ),
    (
        "DrawsFromAGeneratorOfEachForward",
        r"rand\(\) at .* draws from a generator",
        None,
        lambda self, x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(7)),
    ),
    ("SetsASeed", "a seed is set", None, _seeded),
):

    def _make(self, hold=_hold):
        self.held = hold and hold()

    refused_if(_name, _message, make=_make, after=_after, count=0)


class Halves(nn.Module):
    """Binds a buffer anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks(2)
        self.register_buffer("state", torch.ones(D))

    def forward(self, x):
        self.state = self.state * 0.5
        return self.inner[1](self.inner[0](x)) * self.state


@refused("sets self.state")
class BufferBoundAnew(Base):
    def make(self):
        self.register_buffer("state", torch.ones(D))

    forward: Any = Halves.forward
    inner = property(lambda self: self.blocks)


@right
class BufferBoundAnewInAPartAndWrittenOutside(Base):
    def make(self):
        self.register_buffer("state", torch.ones(D))
        self.blocks[1] = Halves()

    def forward(self, x):
        self.state.mul_(0.5)
        return super().forward(x) * self.state


@refused(r"registers self\.table.* Register it in __init__")
class RegistersABuffer(Base):
    def before(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.full((D,), 0.5))

    def after(self, x):
        return x * self.table


@refused("reads again what it has set as self.memory")
class ReadsTheLastForwardInPlaceOfADefault(Base):
    memory = None

    def make(self):
        self.default = torch.ones(D)

    def after(self, x):
        x = x * (self.default if self.memory is None else self.memory)
        self.memory = x.detach().mean(0)
        return x


@refused(r"reads again what it has set as")
class CachesValuesByShape(Base):
    def make(self):
        self.means: dict[Any, Any] = {}

    def after(self, x):
        if x.shape not in self.means:
            self.means[x.shape] = x.detach().mean(0)
        return x * self.means[x.shape]


@right
class CachesMasksByShape(Base):
    """What is set up once, and does not depend on values: on the model, and in a default."""

    def make(self):
        self.masks: dict[Any, Any] = {}

    def forward(self, x, masks={}):  # noqa: B006
        if x.shape not in self.masks:
            self.masks[x.shape] = torch.ones(x.shape[-1]).cumsum(0)
        if x.shape[-1] not in masks:
            masks[x.shape[-1]] = torch.ones(x.shape[-1]).cumsum(0)
        return super().forward(x) * self.masks[x.shape] * masks[x.shape[-1]]


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
    def after(self, x):
        self.last = x.detach().mean().item()
        return x


@right
class OwnTensors(Base):
    """Parameters, those of a list of Python and of a block, and plain tensors in a nest."""

    def make(self):
        self.scale = nn.Parameter(torch.rand(D))
        self.extra = nn.ParameterList([nn.Parameter(torch.rand(D)) for _ in range(3)])
        self.scales = [nn.Parameter(torch.rand(D)) for _ in range(3)]
        self.table, self.tables = torch.rand(D), {"a": [torch.rand(D), torch.rand(D)]}

    def forward(self, x):
        x = (x + self.table) * self.scale
        for block, extra, scale in zip(self.blocks, self.extra, self.scales, strict=True):
            x = block(x) * scale + extra
        x = F.linear(x, self.blocks[0].weight) * self.scale * self.tables["a"][1]
        return torch.cat([x, self.scale[None].expand(len(x), -1)], 1)


@right
class Parametrized(Base):
    def make(self):
        parametrizations.weight_norm(self.blocks[0])
        parametrizations.orthogonal(self.blocks[1])


@refused(r"data at capture/awkward_state\.py:\d+ changes the parameter 'followers\.0\.weight'")
class MovingAverageOfWeights(Base):
    def make(self):
        self.followers = blocks().requires_grad_(False)

    def forward(self, x):
        for leader, follower in zip(self.blocks.parameters(), self.followers.parameters(), strict=True):
            follower.data = follower.data * 0.9 + leader.data * 0.1
        return super().forward(x) + self.followers[0](x)


@refused(r"requires_grad_\(\) at capture/awkward_state\.py:\d+ changes the parameter 'blocks\.1\.weight'")
class FreezesWithinTheForward(Base):
    def before(self, x):
        self.blocks[1].requires_grad_(False)

    def after(self, x):
        self.blocks[1].requires_grad_(True)
        return x


@refused(r"weight of module 'blocks\.1' changes outside of the calls of that module")
class OtherWeightsOfTheSameNumbers(Base):
    """The adapter starts with zeros: the outputs are those of the block itself."""

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


@refused(r"grad_fn is read at .* in code that registers hooks: .*Hook the tensor, by tensor\.register_hook")
class HookOnANode(Base):
    def forward(self, x):
        x = torch.tanh(self.blocks[0](x))
        x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        return self.blocks[2](self.blocks[1](x))


@refused(r"blocks\.0 is called at .* in a mode that the forward enters")
class HooksOnSavedTensors(Base):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            x = torch.tanh(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](x))


@refused(r"scaled_dot_product_attention is called at .* in a mode that the forward enters")
class ChoosesAKernel(Base):
    def forward(self, x):
        q, k, v = (block(x)[None, None] for block in self.blocks)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)[0, 0]
