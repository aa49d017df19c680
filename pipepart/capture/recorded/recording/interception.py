"""Routes calls of modules and custom autograd functions to a recorder, whose torch mode does not see them.

The class of a module stays what it is, as models ask for it (``type(block) is Block``). A call of a module goes through
its attribute ``_compiled_call_impl``, where torch.compile puts compiled code; the recorder puts itself there. A class
with a ``__call__`` of its own does not look there first, so its ``__call__`` is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from ..python_state.access import bindings, rebind
from .recorder import Recorder

_HOOK = "_compiled_call_impl"
_lock = threading.Lock()
# By owner and name: how many threads record, and what was there, if anything.
_replaced: dict[tuple[int, str], tuple[int, dict[str, Any]]] = {}
_local = threading.local()  # recording: of this thread, its recorder and the modules that stay whole
_apply_of_base: Any = torch._C._FunctionBase.__dict__["apply"]
# Until torch 2.13 Function.apply calls that of its base class. Since 2.14 it is that of its base class, written in C.
_APPLY_IS_C = vars(Function)["apply"] is _apply_of_base


@contextmanager
def routed(
    recorder: Recorder,
    whole: Mapping[nn.Module, str],
    parts: Mapping[nn.Module, str],
    getters: Iterable[dict[str, Any]],
) -> Iterator[None]:
    """Within the block, record calls of these modules and of custom autograd functions in this thread as single calls.

    Reentrant checkpoints run inline.

    Args:
        recorder: of this thread.
        whole: the modules.
        parts: modules inside of these, whose calls from outside are refused, with the paths of the whole ones.
        getters: the globals of code whose calls of ``getattr`` and ``hasattr`` are noted.
    """
    calls = {kind: vars(kind)["__call__"] for kind in map(_own_call, whole) if kind is not None}
    outer = getattr(_local, "recording", None)
    hooked = [(module, vars(module).get(_HOOK)) for module in (*whole, *parts)]
    with ExitStack() as stack:
        # Models keep Function.apply under other names (ste = Round.apply). Such a name calls what is replaced here only
        # if Function.apply is Python code; else TensorNumbers refuses what it returns.
        called = Function if _APPLY_IS_C else _SingleLevelFunction
        stack.enter_context(_replaced_in(called, "apply", classmethod(_apply)))
        for kind, original in calls.items():
            stack.enter_context(_replaced_in(kind, "__call__", _taken(original)))
        for table in getters:
            stack.enter_context(_replaced_in(table, "getattr", _noted(getattr)))
            stack.enter_context(_replaced_in(table, "hasattr", _noted(hasattr)))
        _local.recording = recorder, whole
        try:
            for module, compiled in hooked:
                original = _original_call(compiled)
                call = _taken(original) if module in whole else _inside(parts[module], original)
                vars(module)[_HOOK] = partial(call, module)
            yield
        finally:
            _local.recording = outer
            for module, compiled in hooked:
                del vars(module)[_HOOK]
                if compiled is not None:
                    vars(module)[_HOOK] = compiled


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a custom autograd function; in place of ``apply`` of the base class of ``torch.autograd.Function``."""
    recorder, _ = getattr(_local, "recording", None) or (None, ())
    if recorder is None or not recorder.here:
        return _apply_of_base.__get__(None, cls)(*args, **kwargs)
    if cls is CheckpointFunction:
        return args[0](*args[2:])
    return recorder.function(_Applied(cls), cls.__name__, args, kwargs)


def _own_call(module: nn.Module) -> type | None:
    """Return the user's class whose ``__call__`` a call of a module runs first; None if that is torch's."""
    kind = next(kind for kind in type(module).__mro__ if "__call__" in vars(kind))
    return None if kind.__module__.startswith("torch.") else kind


def _taken(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` that gives calls of whole modules to the recorder of this thread."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder, whole = getattr(_local, "recording", None) or (None, ())
        if recorder is None or self not in whole:
            return original(self, *args, **kwargs)
        if recorder.here:
            return recorder.module(self, original, args, kwargs)
        recorder.note_inner_call(self)
        return original(self, *args, **kwargs)

    return call


def _inside(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` for a part of the whole module at ``path`` that lets the recorder refuse other callers."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder, _ = getattr(_local, "recording", None) or (None, ())
        if recorder is not None and recorder.here:
            recorder.refuse_part(self, path)
        return original(self, *args, **kwargs)

    return call


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``getattr`` or ``hasattr`` that tells the recorder of this thread what it reads of modules."""

    def get(owner: Any, name: str, *default: Any) -> Any:
        recorder, _ = getattr(_local, "recording", None) or (None, ())
        if recorder is not None and recorder.here and isinstance(owner, nn.Module):
            recorder.note_attribute(owner, name)
        return original(owner, name, *default)

    return get


def _original_call(compiled: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the ``__call__`` of torch for a module; ``compiled`` is its compiled code, if any."""

    def original(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs) if compiled is None else compiled(*args, **kwargs)

    return original


@contextmanager
def _replaced_in(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class, or an entry of a dict, until the last thread that does so is through."""
    key = id(owner), name
    with _lock:
        held = bindings(owner)
        users, was = _replaced.get(key, (0, {name: held[name]} if name in held else {}))
        if not users:
            rebind(owner, [name], {name: value})
        _replaced[key] = users + 1, was
    try:
        yield
    finally:
        with _lock:
            users, was = _replaced.pop(key)
            if users > 1:
                _replaced[key] = users - 1, was
            else:
                rebind(owner, [name], was)


class _Applied:
    """A custom autograd function as one callable."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.__name__ = kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.apply(*args, **kwargs)
