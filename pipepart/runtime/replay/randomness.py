"""Seeds random numbers by the seed, step, micro-batch and layer only, so that cut and schedule do not change them.

If all workers drew from torch's CPU generator, the numbers would depend on the order of the threads. Here each
random operation of a layer gets a generator state of its own. The global generator is read when a step begins and,
if a layer drew at all, advanced by one number when it ends: a step is reproducible from ``torch.manual_seed``, differs
from the next, and is the same for every cut, schedule and number of devices. The second forward of a recomputed
micro-batch draws the same numbers again. A forward that draws from a generator of the layer's own, or from cuDNN's, is
not repeated.

Catching draws costs some microseconds per layer and draw, so only some layers run under it::

    layer                             one forward                     two forwards (recompute)
    torch modules that never draw     no                              no
    dropout and the like              while its rate is above 0       yes
    any other                         until it has drawn nothing      yes

A layer of the last kind may begin to draw at a later step, as stochastic depth with a rising rate does. Recompute is
exact then, too, as both forwards are caught. Otherwise that step draws from torch's generator in the order of the
threads. The generator has moved, so all layers are caught again from the next step on.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils import checkpoint

from ...autograd.random_operations import RandomMode, register
from ...capture import FORWARD_HOOKS
from ...generators import GENERATOR_LOCKS, state_of


class ForwardPass(Enum):
    """Which forward of a micro-batch runs: the only one, or the first or second of two."""

    ONLY = 0
    FIRST = 1
    SECOND = 2


class RngKeys:
    """The random numbers of one step. Made by the caller's thread, used by all workers.

    Args:
        seed: what they depend on; None for the state of the caller's generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            state = state_of().numpy().tobytes()
            seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
        self.seed = seed
        self.drawn = False
        self._finished = False

    def of(self, layer: int, micro_batch: int) -> KeyedDraws:
        """Return the mode under which one forward of a layer draws; ``layer`` is its position in the model."""
        return KeyedDraws(self, hash((self.seed, layer, micro_batch)))

    def finish(self) -> None:
        """Advance the global generator if any layer drew, so that the next step draws other numbers."""
        if self.drawn and not self._finished:
            cpu = torch.device("cpu")  # even if the caller has set another default device
            with GENERATOR_LOCKS[cpu]:
                torch.rand((), device=cpu)
        self._finished = True


class KeyedLayers:
    """Decides which layers of a stage run under :class:`KeyedDraws`. Used by the stage's worker.

    Args:
        modules: the stage's layers.
        first: the position of the first of them in the model.
        device: of the stage.

    Attributes:
        all_of_torch: whether all layers are made of torch modules which never draw.
        unkeyed: for each layer whether it runs without :meth:`drawing` in the only forward of a micro-batch.
        all_unkeyed: whether all of them do.
        never: the same in one of two forwards.
    """

    def __init__(self, modules: Sequence[nn.Module], first: int, device: torch.device) -> None:
        self._modules = modules
        self._first = first
        self._device = device
        parts = [tuple(module.modules()) for module in modules]
        # The attributes of layers that are made of torch modules which never draw; None for others.
        self._tables = [
            [part.__dict__ for part in inner] if all(type(part) in _NEVER_DRAWING for part in inner) else None
            for inner in parts
        ]
        self._all_tables = [table for tables in self._tables if tables is not None for table in tables]
        self._are_of_torch = [tables is not None for tables in self._tables]
        self.all_of_torch = all(self._are_of_torch)
        if not self.all_of_torch:
            register()
        self._drawing = [[part for part in inner if isinstance(part, _DRAWING)] for inner in parts]
        # Whether each layer draws, by its mode; absent until it has run in that mode.
        self._draws: list[dict[bool, bool]] = [{} for _ in parts]
        self.never: list[bool] = []
        self.unkeyed: list[bool] = []
        self.all_unkeyed = False
        self._before: list[bytes] | None = None  # states of generators before the step

    def begin(self) -> None:
        """Look at the layers' modes and hooks, before a step."""
        self.never = self._are_of_torch
        if any(map(_is_patched, self._all_tables)):
            self.never = [tables is not None and not any(map(_is_patched, tables)) for tables in self._tables]
        self._decide()
        self._before = None if self.unkeyed == self.never else self.generator_states()

    @contextmanager
    def drawing(self, index: int, micro_batch: int, keys: RngKeys) -> Iterator[KeyedDraws]:
        """Have a layer draw keyed numbers within the block, and note whether it does."""
        with keys.of(self._first + index, micro_batch) as draws:
            yield draws
        mode = self._modules[index].training
        if mode not in self._draws[index]:
            self._draws[index][mode] = draws.used
            self._decide()

    def look_again(self) -> None:
        """Forget which layers draw nothing."""
        self._draws = [{mode: True for mode, drew in by_mode.items() if drew} for by_mode in self._draws]
        self._decide()

    def finish(self) -> None:
        """Look at all layers again if a generator has moved in the step. Called after it, when no worker draws."""
        if self._before is not None and self.generator_states() != self._before:
            self.look_again()
        self._before = None

    def generator_states(self) -> list[bytes]:
        """Return the states of torch's generators for the CPU and the stage's device."""
        devices = (
            [torch.device("cpu"), self._device] if self._device.type == "cuda" else [torch.device("cpu")]
        )
        return [state_of(device).numpy().tobytes() for device in devices]

    def _decide(self) -> None:
        self.unkeyed = [never or self._draws_nothing(index) for index, never in enumerate(self.never)]
        self.all_unkeyed = all(self.unkeyed)

    def _draws_nothing(self, index: int) -> bool:
        """Return True if a layer has run in its present mode without drawing, and no rate of dropout is above 0."""
        known = self._draws[index].get(self._modules[index].training)
        return known is False and not any(map(_lets_draw, self._drawing[index]))


class KeyedDraws(RandomMode):
    """While it is entered, each random operation of this thread draws from a state of its own.

    Attributes:
        count: draws from torch's own generator.
        used: whether anything was drawn, from whatever generator.
        repeatable: whether a second forward can draw the same numbers.
    """

    def __init__(self, keys: RngKeys, seed: int) -> None:
        super().__init__()
        self.count = 0
        self.used = False
        self.repeatable = True
        self._keys = keys
        self.seed = seed

    def draw(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a random operation with a seed of its own, unless the caller gives it a generator."""
        signature, given = _signature_of(operation), kwargs
        if not signature.is_simple:
            given = signature.named(args, kwargs)
            if signature.is_idle(given):
                return operation(*args, **kwargs)
        self.used = True
        if given.get("generator") is not None:
            self.repeatable = False
            return operation(*args, **kwargs)
        _refuse_checkpoint()
        if signature.is_cudnn_rnn:  # the state of its dropout is reached by no generator
            self.repeatable = False
        self._keys.drawn = True
        device = _device_of(args, kwargs)
        seed = self.next_seed()
        if signature.takes_generator:
            kwargs = {**kwargs, "generator": _thread.generator_of(device).manual_seed(seed)}
            return operation(*args, **kwargs)
        return _with_global_seed(device, seed, operation, args, kwargs)

    def next_seed(self) -> int:
        """Return the seed of the next draw, and count it."""
        self.count += 1
        return hash((self.seed, self.count)) & (2**63 - 1)


class _Thread(threading.local):
    """The generators of the calling thread, which are seeded for each draw."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator_of(self, device: torch.device) -> torch.Generator:
        """Return the thread's generator for a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device]


_thread = _Thread()


def _lets_draw(part: Any) -> bool:
    """Return True if a module of a kind that draws does so with its present settings."""
    rate = getattr(part, "p", getattr(part, "dropout", 1.0))  # torch calls it by either name
    return part.training and rate > 0


_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


def _types_that_never_draw() -> Iterator[type]:
    rooms = "activation batchnorm conv flatten fold instancenorm linear normalization padding pixelshuffle pooling"
    for room in (getattr(nn.modules, name) for name in [*rooms.split(), "sparse", "upsampling"]):
        for name in room.__all__:
            kind = getattr(room, name)
            if not issubclass(kind, _DRAWING) and not name.startswith(("Lazy", "Fractional")):
                yield kind
    yield nn.Sequential


_NEVER_DRAWING = frozenset(_types_that_never_draw())


def _is_patched(attributes: dict[str, Any]) -> bool:
    """Return True if a module has hooks around its forward, or another forward than its type."""
    hooks, pre_hooks = FORWARD_HOOKS
    return bool(attributes[hooks] or attributes[pre_hooks] or "forward" in attributes)


_SWITCHES = {
    "dropout_p": 0,
    "dropout": 0,
    "training": False,
    "train": False,
}  # arguments without which none draws


class _Signature:
    """The arguments of a random operation.

    Attributes:
        is_simple: whether it always draws, and takes a generator by its keyword.
        takes_generator: whether it takes one.
        is_cudnn_rnn: whether it is a recurrent layer of cuDNN's.
    """

    def __init__(self, operation: Any) -> None:
        self._defaults = {one.name: one.default_value for one in operation._schema.arguments}
        keywords = {one.name for one in operation._schema.arguments if one.kwarg_only}
        self.is_simple = "generator" in keywords and self._defaults.keys().isdisjoint(_SWITCHES)
        self.takes_generator = "generator" in self._defaults
        self.is_cudnn_rnn = operation.name().startswith("aten::_cudnn_rnn")

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by their names."""
        return {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **kwargs}

    def is_idle(self, named: dict[str, Any]) -> bool:
        """Return True if it draws nothing with these arguments, as attention without dropout."""
        return any(named.get(name) == idle for name, idle in _SWITCHES.items())


@cache
def _signature_of(operation: Any) -> _Signature:
    return _Signature(operation)


def _refuse_checkpoint() -> None:
    """Raise if torch.utils.checkpoint will recompute the layer in the backward, which would draw other numbers."""
    if torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is None:
        return  # neither kind of checkpoint: one runs without gradients, the other with hooks
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                "a layer draws random numbers under torch.utils.checkpoint: its recomputed forward would draw others "
                "and the gradients would be wrong. Take the checkpoint or the dropout out of this layer. A model of "
                "transformers has model.gradient_checkpointing_disable(). The plan decides what is recomputed"
            )
        frame = frame.f_back


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which a random operation draws."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def _with_global_seed(
    device: torch.device, seed: int, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that only knows its device's global generator, and put that back.

    Devices have generators of their own, so a worker waits only for those that share its device.
    """
    generator = _global_generator(device)
    with GENERATOR_LOCKS[generator.device]:
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return operation(*args, **kwargs)
        finally:
            generator.set_state(state)
