"""Puts a recorder in the way of what torch does not show it: whole modules and custom autograd functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from .recorder import Recorder


class TakesModules(Protocol):
    """Takes the calls of whole modules: a recorder."""

    @property
    def here(self) -> bool:
        """Whether a call in this thread is to be taken."""
        ...

    def module(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Call a whole module by ``call(module, *args, **kwargs)``."""
        ...


def patched_functions(recorder: Recorder) -> Any:
    """Within the block, custom autograd functions are single calls, and a reentrant checkpoint runs its function."""
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.here:
            return original(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            return args[0](*args[2:])
        return recorder.function(_Bound(original, cls), cls.__name__, args, kwargs)

    @contextmanager
    def patched() -> Iterator[None]:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = classmethod(original)  # type: ignore[method-assign, assignment]

    return patched()


@contextmanager
def called_whole(recorder: TakesModules, model: nn.Module, whole: Mapping[nn.Module, str]) -> Iterator[None]:
    """Within the block, calls of these modules go to the recorder: their classes are replaced by subclasses.

    A TorchScript module does not let its class be replaced: its parent gets another module in its place.
    """
    kinds = {module: type(module) for module in whole if not isinstance(module, torch.jit.ScriptModule)}
    scripted = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in whole and child not in kinds
    ]

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kinds[module]
        if not recorder.here:
            return kind.__call__(module, *args, **kwargs)
        module.__class__ = kind
        try:
            return recorder.module(module, kind.__call__, args, kwargs)
        finally:
            module.__class__ = watched[kind]

    watched = {
        kind: type(kind.__name__, (kind,), {"__call__": called, "__module__": kind.__module__})
        for kind in set(kinds.values())
    }
    try:
        for module, kind in kinds.items():
            module.__class__ = watched[kind]
        for parent, name, child in scripted:
            parent._modules[name] = _Stands(recorder, child)  # type: ignore[index]
        yield
    finally:
        for parent, name, child in scripted:
            parent._modules[name] = child  # type: ignore[index]
        for module, kind in kinds.items():
            module.__class__ = kind


class _Stands(nn.Module):
    """Stands for a TorchScript module while it is recorded."""

    def __init__(self, recorder: TakesModules, module: Any) -> None:
        super().__init__()
        self.__dict__.update(recorder=recorder, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.here:
            return self.module(*args, **kwargs)
        return self.recorder.module(self.module, lambda module, *a, **k: module(*a, **k), args, kwargs)


class _Bound:
    """A custom autograd function as one callable."""

    def __init__(self, apply: Any, cls: Any) -> None:
        self._apply, self._cls = apply, cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self._cls, *args, **kwargs)
