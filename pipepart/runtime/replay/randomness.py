"""Random numbers that depend on the seed, the step, the micro-batch and the layer, and on nothing else.

Workers that drew from torch's one CPU generator would do so in the order in which they happen to run. Here each
random operation of a layer gets a generator state of its own. The global generator is read when a step begins and,
if a layer drew at all, moved on by one number when it ends: a step is reproducible from ``torch.manual_seed``, differs
from the next, and is the same for every cut, schedule and number of devices. A forward that runs a second time draws
the same again; where a layer draws from a generator of its own, from the state which that had at the first.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

GLOBAL_GENERATOR = threading.Lock()  # held by whoever uses the global generator of any device
_TAKES_GENERATOR: dict[Any, bool] = {}


class Turn(Enum):
    """Which forward of a micro-batch it is: the only one, or the first or second of two."""

    ONLY = 0
    FIRST = 1
    SECOND = 2


class Draws:
    """The random numbers of one step. Made by the caller's thread, used by all workers."""

    def __init__(self) -> None:
        state = torch.default_generator.get_state().numpy().tobytes()
        self._seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
        self.drawn = False
        self._finished = False
        self._own_states: dict[tuple[int, int], list[Tensor]] = {}

    def of(self, layer: int, micro_batch: int, turn: Turn = Turn.ONLY) -> LayerDraws:
        """Those of one forward of a layer, by its place in the whole model."""
        place = layer, micro_batch
        own_states: list[Tensor] | None = None
        if turn is Turn.FIRST:
            own_states = self._own_states[place] = []
        elif turn is Turn.SECOND:
            own_states = self._own_states.pop(place, [])
        return LayerDraws(self, hash((self._seed, *place)), turn, own_states)

    def finish(self) -> None:
        """Moves the global generator on if any layer drew, so that the next step draws other numbers."""
        if self.drawn and not self._finished:
            torch.rand((), device="cpu")  # wherever the caller has new tensors made
        self._finished = True


class LayerDraws(TorchDispatchMode):
    """While it is entered, each random operation of this thread draws from a state of its own.

    Attributes:
        count: draws from torch's own generator.
        used: whether anything was drawn, from whatever generator.
    """

    def __init__(self, draws: Draws, seed: int, turn: Turn, own_states: list[Tensor] | None) -> None:
        super().__init__()
        self.count = 0
        self.used = False
        self._draws = draws
        self._seed = seed
        self._turn = turn
        self._own_states = own_states

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _arguments_of_draw(func, args, kwargs)
        if given is None:
            return func(*args, **kwargs)
        self.used = True
        if given.get("generator") is not None:
            return self._from_own(given["generator"], func, args, kwargs)
        _refuse_checkpoint()
        self._draws.drawn = True
        self.count += 1
        seed = hash((self._seed, self.count)) & (2**63 - 1)
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), kwargs.get("device"))
        if _takes_generator(func):
            generator = torch.Generator(device or "cpu").manual_seed(seed)
            return func(*args, **kwargs, generator=generator)
        return _with_global_seed(torch.device(device or "cpu"), seed, func, args, kwargs)

    def _from_own(
        self, generator: torch.Generator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A draw from the layer's generator, which a second forward neither finds further on nor moves."""
        if self._own_states is None:
            return func(*args, **kwargs)
        now = generator.get_state()
        if self._turn is Turn.FIRST:
            self._own_states.append(now)
            return func(*args, **kwargs)
        generator.set_state(self._own_states.pop(0))
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(now)


def may_draw(module: nn.Module) -> bool:
    """Whether a module is of a kind that draws in training, if its present settings let it."""
    return any(isinstance(part, _DRAWING) for part in module.modules())


def draws_now(module: nn.Module) -> bool:
    """Whether a module is of a kind that draws, and its present settings let it."""
    return any(isinstance(part, _DRAWING) and _lets_draw(part) for part in module.modules())


def _lets_draw(part: Any) -> bool:
    rate = getattr(part, "p", getattr(part, "dropout", 1.0))  # torch calls it by either name
    return part.training and rate > 0


_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


def _arguments_of_draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of an operation if it draws; attention without dropout, say, is merely marked so."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    idle = given.get("dropout_p") == 0 or given.get("training") is False or given.get("train") is False
    return None if idle else given


def _refuse_checkpoint() -> None:
    """Raises where the layer will run again in the backward, out of reach, and would draw other numbers there."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                "a layer draws random numbers under torch.utils.checkpoint: its recomputed forward would draw others "
                "and the gradients would be wrong. Take the checkpoint or the dropout out of this layer"
            )
        frame = frame.f_back


def _takes_generator(func: Any) -> bool:
    if func not in _TAKES_GENERATOR:
        _TAKES_GENERATOR[func] = any(argument.name == "generator" for argument in func._schema.arguments)
    return _TAKES_GENERATOR[func]


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def _with_global_seed(
    device: torch.device, seed: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs an operation that only knows its device's global generator, and puts that back."""
    with GLOBAL_GENERATOR:
        generator = _global_generator(device)
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            generator.set_state(state)
