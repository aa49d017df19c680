"""Compiles consecutive layers of a stage into one function with torch.compile.

::

    first step      a   b   c   d   e        layers run one by one; each is watched for random draws and added losses
    later steps     [a   b]  c  [d   e]      c draws random numbers, adds a loss or has a hook

Random draws are keyed by layer, and an added loss or a hook is Python that must run once per micro-batch, so such a
layer runs by itself. The regions are chosen when a step begins and hold for all of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture import has_hooks
from ..input_error import InputError, InputTypeError
from ..planning import Plan
from .replay.randomness import draws_now

CompileOptions = bool | Mapping[str, Any]

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
    if "model" in options:
        raise InputTypeError("compile: torch.compile's 'model' is a stage's layers, leave it out")
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


class Region(NamedTuple):
    """Consecutive layers that run as one compiled function.

    Attributes:
        places: the positions of the layers in the stage.
        run: maps the input of the first layer to the output of the last.
    """

    places: tuple[int, ...]
    run: Callable[[Any], Any]


class Regions:
    """The compiled regions of one stage. Used by the stage's worker only.

    Args:
        modules: the stage's layers.
        options: keywords for torch.compile.

    Attributes:
        current: the regions of this step, by the position of their first layer.
    """

    def __init__(self, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        self._modules = modules
        self._submodules = [tuple(module.modules()) for module in modules]
        self._options = options
        self._compiled: dict[tuple[int, ...], Region] = {}
        self._plain: dict[tuple[int, bool], bool] = {}
        self.current: Mapping[int, Region] = {}

    def begin(self) -> None:
        """Choose the regions of a step from the hooks and settings that the layers have now."""
        groups = groupby(range(len(self._modules)), self._may_share)
        regions = (self._region(tuple(places)) for shared, places in groups if shared)
        self.current = {region.places[0]: region for region in regions}

    def note(self, place: int, plain: bool) -> None:
        """Record that a layer ran by itself; ``plain`` if it neither drew random numbers nor added a loss."""
        self._plain[place, self._modules[place].training] = plain

    def _may_share(self, place: int) -> bool:
        module = self._modules[place]
        plain = self._plain.get((place, module.training), False)
        return plain and not draws_now(module) and not any(map(_has_hooks, self._submodules[place]))

    def _region(self, places: tuple[int, ...]) -> Region:
        if places not in self._compiled:
            modules = [self._modules[place] for place in places]
            self._compiled[places] = Region(places, torch.compile(_in_order(modules), **self._options))
        return self._compiled[places]


def _in_order(modules: Sequence[nn.Module]) -> Callable[[Any], Any]:
    """Return a function that runs the layers in order, with a code object of its own.

    torch stops compiling a code object after eight versions, and treats sizes that differ between calls of functions
    of one name as dynamic.
    """

    def layers(value: Any) -> Any:
        for module in modules:
            value = module(value)
        return value

    code = layers.__code__.replace(co_name=f"layers_{next(_NUMBERS)}")
    return FunctionType(code, globals(), code.co_name, None, layers.__closure__)


def _has_hooks(module: nn.Module) -> bool:
    return has_hooks(module) or any(p._backward_hooks for p in module._parameters.values() if p is not None)
