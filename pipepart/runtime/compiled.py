"""Compiles consecutive layers of a stage into one function with torch.compile.

::

    first step      a   b   c   d   e        layers run one by one; each is watched for random draws and added losses
    later steps     [a   b]  c  [d   e]      c draws random numbers, adds a loss or has a hook

Random draws are keyed by layer, and an added loss or a hook is Python that must run once per micro-batch, so such a
layer runs by itself. The regions are chosen when a step begins and hold for all of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, groupby
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture import has_hooks
from ..input_error import InputError, InputTypeError
from ..planning import Plan

CompileOptions = bool | Mapping[str, Any]
RunLayers = Callable[[Any], Any]

_NUMBERS = count()
_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def compile_options(wish: CompileOptions, plan: Plan) -> Mapping[str, Any] | None:
    """Return the keywords for torch.compile; None for no compilation.

    Raises:
        TypeError: ``wish`` is neither a bool nor a mapping of keywords that torch.compile takes.
        ValueError: ``wish`` asks for CUDA graphs on a plan with CUDA devices.
        RuntimeError: torch does not know the backend or the mode.
    """
    if wish is False:
        return None
    if wish is not True and not isinstance(wish, Mapping):
        raise InputTypeError(
            f"compile must be True, False or keywords for torch.compile, got {wish!r}: "
            'compile={"mode": "max-autotune-no-cudagraphs"}'
        )
    options = {} if wish is True else dict(wish)
    graphs = options.get("mode") in _MODES_WITH_CUDA_GRAPHS or (options.get("options") or {}).get(
        "triton.cudagraphs"
    )
    if graphs and any((device.torch_device or "").startswith("cuda") for device in plan.devices):
        raise InputError(
            f"compile={options!r} replays CUDA graphs, which hold the activations of one micro-batch, but a pipeline "
            'has several in flight: use mode="max-autotune-no-cudagraphs"'
        )
    torch.compile(lambda: None, **options)  # torch checks the keywords here and compiles nothing yet
    return options


class Part(NamedTuple):
    """Consecutive layers of a stage that run by one call.

    Attributes:
        start, end: the positions of the first layer, and behind the last.
        run: maps the input of the first layer to the output of the last.
        is_compiled: whether they run as one compiled function.
    """

    start: int
    end: int
    run: RunLayers
    is_compiled: bool


def single_layers(calls: Iterable[RunLayers]) -> list[Part]:
    """Return the parts of a stage that runs its layers one by one."""
    return [Part(index, index + 1, run, False) for index, run in enumerate(calls)]


class Regions:
    """The compiled regions of one stage. Used by the stage's worker only.

    Args:
        modules: the stage's layers.
        singles: the same layers as parts.
        options: keywords for torch.compile.

    Attributes:
        unfit: the positions of layers that run by themselves.
    """

    def __init__(
        self, modules: Sequence[nn.Module], singles: Sequence[Part], options: Mapping[str, Any]
    ) -> None:
        self.unfit: set[int] = set()
        self._modules = modules
        self._submodules = [tuple(module.modules()) for module in modules]
        self._singles = singles
        self._options = options
        self._compiled: dict[tuple[int, int], Part] = {}
        self._modes: set[tuple[bool, ...]] = set()  # that had a step

    def program(self, draws_nothing: Sequence[bool]) -> Sequence[Part]:
        """Return the parts of a step, from the hooks and modes that the layers have now.

        Args:
            draws_nothing: for each layer, whether it is known to draw no random numbers.
        """
        mode = tuple(module.training for module in self._modules)
        if mode not in self._modes:
            self._modes.add(mode)
            return self._singles
        fits = [
            draws_nothing[index] and index not in self.unfit and not any(map(_has_hooks, submodules))
            for index, submodules in enumerate(self._submodules)
        ]
        program: list[Part] = []
        for fit, group in groupby(self._singles, lambda part: fits[part.start]):
            parts = list(group)
            program += [self._region(parts)] if fit else parts
        return program

    def _region(self, parts: Sequence[Part]) -> Part:
        place = parts[0].start, parts[-1].end
        if place not in self._compiled:
            run = torch.compile(_in_order([part.run for part in parts]), **self._options)
            self._compiled[place] = Part(*place, run, True)
        return self._compiled[place]


def _in_order(calls: Sequence[RunLayers]) -> RunLayers:
    """Return a function that runs the layers in order, with a code object of its own.

    torch stops compiling a code object after eight versions, and treats sizes that differ between calls of functions
    of one name as dynamic.
    """

    def layers(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    code = layers.__code__.replace(co_name=f"layers_{next(_NUMBERS)}")
    return FunctionType(code, globals(), code.co_name, None, layers.__closure__)


def _has_hooks(module: nn.Module) -> bool:
    return has_hooks(module) or any(p._backward_hooks for p in module._parameters.values() if p is not None)
