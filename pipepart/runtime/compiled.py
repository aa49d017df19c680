"""Layers that run together through torch.compile, which sees one function over them and none of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..planning import Plan

CompileOptions = bool | Mapping[str, Any]

_NUMBERS = count()
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class Compiled:
    """Some layers as one compiled function; torch compiles it when it is called, in each mode and for other shapes."""

    def __init__(self, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        def layers(value: Any) -> Any:
            for module in modules:
                value = module(value)
            return value

        # torch gives up a code object that it has compiled eight times, and takes sizes that differ between calls of
        # one name for dynamic: so each region gets a code object and a name of its own.
        code = layers.__code__.replace(co_name=f"layers_{next(_NUMBERS)}")
        own = FunctionType(code, globals(), code.co_name, None, layers.__closure__)
        self._run = torch.compile(own, **options)

    def begin(self) -> None:
        """Nothing: torch looks at each call whether what it compiled still holds."""

    def __call__(self, value: Any) -> Any:
        return self._run(value)


def compile_options(wish: CompileOptions, plan: Plan) -> Mapping[str, Any] | None:
    """The keywords for torch.compile; None for no compiling.

    Raises:
        TypeError: the wish is neither a bool nor keywords that torch.compile takes.
        ValueError: it has CUDA graphs, which torch's own replay over micro-batches in flight.
        RuntimeError: torch's, for a backend that is not there.
    """
    if wish is False:
        return None
    if wish is not True and not isinstance(wish, Mapping):
        raise TypeError(
            f"compile must be True, False or keywords for torch.compile, got {wish!r}: "
            'compile={"mode": "max-autotune-no-cudagraphs"}'
        )
    options = {} if wish is True else dict(wish)
    if "model" in options:
        raise TypeError("compile: torch.compile's 'model' is a stage's layers, leave it out")
    graphs = options.get("mode") in _WITH_GRAPHS or (options.get("options") or {}).get("triton.cudagraphs")
    if graphs and any((device.torch_device or "").startswith("cuda") for device in plan.devices):
        raise ValueError(
            f"compile={options!r} has torch replay CUDA graphs of its own, which hold one micro-batch where a pipeline "
            'has several in flight: use mode="max-autotune-no-cudagraphs", and cuda_graphs=True for graphs'
        )
    torch.compile(_nothing, **options)  # has torch look at the keywords, and compiles nothing
    return options


def _nothing() -> None:
    pass
