"""Seeds random numbers by the seed, step, micro-batch and layer only, so that cut and schedule do not change them.

If all workers drew from torch's CPU generator, the numbers would depend on the order of the threads. Here each
random operation of a layer gets a generator state of its own. The global generator is read when a step begins and,
if a layer drew at all, advanced by one number when it ends: a step is reproducible from ``torch.manual_seed``, differs
from the next, and is the same for every cut, schedule and number of devices. The second forward of a recomputed
micro-batch draws the same numbers again; a layer with a generator of its own draws from the state that the generator
had at the first.

Catching draws costs a Python call per operation, so only some layers run under it::

    layer                             one forward                     two forwards (recompute)
    torch modules that never draw     no                              no
    dropout and the like              yes                             yes
    any other                         until it has drawn nothing      yes

A layer of the last kind may begin to draw at a later step, as stochastic depth with a rising rate does. It is caught
again throughout a step before which a number in its attributes changed, such as that rate. If it begins for another
reason, recompute is exact, as both forwards are caught. Else torch's generator has moved in that step, and the layer is
caught from the next step on.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from itertools import islice, takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ...autograd.dispatch_mode import DispatchMode
from ...capture import FORWARD_HOOKS

_MAY_DRAW: dict[Any, bool] = {}  # by operation: torch's tags are searched once
_GENERATOR_LOCKS: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


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
            state = torch.default_generator.get_state().numpy().tobytes()
            seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
        self.seed = seed
        self.drawn = False
        self._finished = False
        self._own_states: dict[tuple[int, int], list[Tensor]] = {}

    def of(self, layer: int, micro_batch: int, which: ForwardPass = ForwardPass.ONLY) -> KeyedDraws:
        """Return the mode under which one forward of a layer draws; ``layer`` is its position in the model."""
        place = layer, micro_batch
        own_states: list[Tensor] | None = None
        if which is ForwardPass.FIRST:
            own_states = self._own_states[place] = []
        elif which is ForwardPass.SECOND:
            own_states = self._own_states.pop(place, [])
        return KeyedDraws(self, hash((self.seed, *place)), which, own_states)

    def finish(self) -> None:
        """Advance the global generator if any layer drew, so that the next step draws other numbers."""
        if self.drawn and not self._finished:
            torch.rand((), device="cpu")  # on the CPU even if the caller has set another default device
        self._finished = True


class KeyedLayers:
    """Decides which layers of a stage run under :class:`KeyedDraws`. Used by the stage's worker.

    Args:
        modules: the stage's layers.
        first: the position of the first of them in the model.
        device: of the stage.
    """

    def __init__(self, modules: Sequence[nn.Module], first: int, device: torch.device) -> None:
        self._first = first
        self._device = device
        self._layers = [_Layer(module) for module in modules]
        self._never: list[bool] = []
        self._unkeyed: list[bool] = []
        self._before: list[bytes] | None = None  # states of generators before the step

    def begin(self) -> None:
        """Look at the layers' modes and hooks, before a step."""
        for layer in self._layers:
            layer.begin()
        self._never = [layer.never for layer in self._layers]
        self._decide()
        self._before = None if self._unkeyed == self._never else self.generator_states()

    def unkeyed(self, which: ForwardPass) -> Sequence[bool]:
        """Return for each layer whether it runs without :meth:`drawing`."""
        return self._unkeyed if which is ForwardPass.ONLY else self._never

    @contextmanager
    def drawing(
        self, index: int, micro_batch: int, keys: RngKeys, which: ForwardPass
    ) -> Iterator[KeyedDraws]:
        """Have a layer draw keyed numbers within the block, and note whether it does."""
        with keys.of(self._first + index, micro_batch, which) as draws:
            yield draws
        if self._layers[index].note(draws.used):
            self._decide()

    def look_again(self, index: int) -> None:
        """Forget that a layer draws nothing."""
        self._layers[index].look_again()
        self._decide()

    def finish(self) -> None:
        """Look at all layers again if a generator has moved in the step. Called after it, when no worker draws."""
        if self._before is not None and self.generator_states() != self._before:
            for layer in self._layers:
                layer.look_again()
        self._before = None

    def generator_states(self) -> list[bytes]:
        """Return the states of torch's generators for the CPU and the stage's device."""
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(_global_generator(self._device))
        return [generator.get_state().numpy().tobytes() for generator in generators]

    def _decide(self) -> None:
        self._unkeyed = [layer.never or layer.is_idle() for layer in self._layers]


class _Layer:
    """What is known of the draws of one layer.

    Attributes:
        never: whether it is made of torch modules that never draw, without hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = tuple(module.modules())
        self._tables = [part.__dict__ for part in self._parts]
        self._of_known_types = all(type(part) in _NEVER_DRAWING for part in self._parts)
        # Numbers in the attributes of types whose forwards are not known; a rate of dropout may be among them.
        others = [part for part in self._parts if type(part) not in _NEVER_DRAWING]
        self._others = [(part, part.__dict__, _torchs_attributes(part)) for part in others]
        self._settings = _numbers(self._others)
        self._changed = False  # whether its settings have, since the step before
        # Whether it draws, by mode; absent until it has run in that mode.
        self._draws = {True: True} if any(isinstance(part, _DRAWING) for part in self._parts) else {}
        self.never = False

    def begin(self) -> None:
        self.never = self._of_known_types and not any(map(_is_patched, self._tables))
        if not self._of_known_types:
            before, self._settings = self._settings, _numbers(self._others)
            self._changed = self._settings != before
            if self._changed:
                self.look_again()

    def is_idle(self) -> bool:
        """Return True if it has run in its present mode and drawn nothing."""
        return self._draws.get(self._module.training) is False

    def note(self, drew: bool) -> bool:
        """Note whether a forward drew; return True if that was not known."""
        mode = self._module.training
        if mode in self._draws or (self._changed and not drew):
            return False
        self._draws[mode] = drew
        return True

    def look_again(self) -> None:
        self._draws = {mode: True for mode, drew in self._draws.items() if drew}


class KeyedDraws(DispatchMode):
    """While it is entered, each random operation of this thread draws from a state of its own.

    Attributes:
        count: draws from torch's own generator.
        used: whether anything was drawn, from whatever generator.
    """

    def __init__(self, keys: RngKeys, seed: int, which: ForwardPass, own_states: list[Tensor] | None) -> None:
        super().__init__()
        self.count = 0
        self.used = False
        self._keys = keys
        self.seed = seed
        self._which = which
        self._own_states = own_states

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        may_draw = _MAY_DRAW.get(func)
        if may_draw is None:
            may_draw = _MAY_DRAW[func] = torch.Tag.nondeterministic_seeded in func.tags
        given = _arguments_of_draw(func, args, kwargs) if may_draw else None
        if given is None:
            return func(*args, **kwargs)
        self.used = True
        if given.get("generator") is not None:
            return self._from_own(given["generator"], func, args, kwargs)
        _refuse_checkpoint()
        if self._which is not ForwardPass.ONLY:
            _refuse_cudnn_dropout(func)
        self._keys.drawn = True
        seed = self.next_seed()
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), kwargs.get("device"))
        if _takes_generator(func):
            generator = torch.Generator(device or "cpu").manual_seed(seed)
            return func(*args, **kwargs, generator=generator)
        return _with_global_seed(torch.device(device or "cpu"), seed, func, args, kwargs)

    def next_seed(self) -> int:
        """Return the seed of the next draw, and count it."""
        self.count += 1
        return hash((self.seed, self.count)) & (2**63 - 1)

    def _from_own(
        self, generator: torch.Generator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Draw from the layer's generator, which a second forward neither finds further on nor moves."""
        if self._own_states is None:
            return func(*args, **kwargs)
        now = generator.get_state()
        if self._which is ForwardPass.FIRST:
            self._own_states.append(now)
            return func(*args, **kwargs)
        generator.set_state(self._own_states.pop(0))
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(now)


def _numbers(parts: Sequence[tuple[nn.Module, dict[str, Any], int]]) -> list[Any]:
    """Return the modes of modules, and the numbers among their attributes without the first ones of each."""
    found: list[Any] = [part.training for part, _, _ in parts]
    for _, table, first in parts:
        found += [value for value in islice(table.values(), first, None) if isinstance(value, int | float)]
    return found


def _torchs_attributes(module: nn.Module) -> int:
    """Return how many attributes a module begins with that every module has."""
    return sum(1 for _ in takewhile(_EVERY_MODULES.__contains__, module.__dict__))


def draws_now(module: nn.Module) -> bool:
    """Return whether a module is of a kind that draws, and its present settings let it."""
    return any(isinstance(part, _DRAWING) and _lets_draw(part) for part in module.modules())


def _lets_draw(part: Any) -> bool:
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


_EVERY_MODULES = frozenset(vars(nn.Module()))
_NEVER_DRAWING = frozenset(_types_that_never_draw())


def _is_patched(attributes: dict[str, Any]) -> bool:
    """Return True if a module has hooks around its forward, or another forward than its type."""
    return "forward" in attributes or any(attributes[table] for table in FORWARD_HOOKS)


def _arguments_of_draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of an operation that may draw; None if it does not, as attention without dropout."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    dropout = given.get("dropout_p", given.get("dropout"))  # of attention, of cuDNN's recurrent layers
    idle = dropout == 0 or given.get("training") is False or given.get("train") is False
    return None if idle else given


def _refuse_checkpoint() -> None:
    """Raise if torch.utils.checkpoint will recompute the layer in the backward, which would draw other numbers."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                "a layer draws random numbers under torch.utils.checkpoint: its recomputed forward would draw others "
                "and the gradients would be wrong. Take the checkpoint or the dropout out of this layer"
            )
        frame = frame.f_back


def _refuse_cudnn_dropout(func: Any) -> None:
    """Raise for dropout within cuDNN's recurrent layers, whose state no generator reaches."""
    if func.name().startswith("aten::_cudnn_rnn"):
        raise RuntimeError(
            "a recurrent layer with dropout between its layers keeps the state of its random numbers in cuDNN, so a "
            "recomputed forward would draw others and the gradients would be wrong. Put nn.Dropout between recurrent "
            "layers of one layer each, or plan with recompute='never'"
        )


@cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def _with_global_seed(
    device: torch.device, seed: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that only knows its device's global generator, and put that back.

    Devices have generators of their own, so a worker waits only for those that share its device.
    """
    generator = _global_generator(device)
    with _GENERATOR_LOCKS[generator.device]:
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            generator.set_state(state)
