"""Intercepts the random operations of a thread. Other operations run at their usual speed.

A ``TorchDispatchMode`` costs a Python call for each operation, which is as much as a small layer computes. Here torch's
dispatcher skips the others itself, as it does for ``torch.vmap(randomness=...)``: random operations have a kernel under
a dispatch key that torch keeps for modes and does not use, all others fall through, and a mode includes the key in the
thread's dispatch.

::

    with mode:
        x = linear(x)              CPU kernel
        x = dropout(x, 0.1)        dispatched within as bernoulli_ ──▶ mode.draw(bernoulli_, (noise, 0.9), {})
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.library import Library, fallthrough_kernel

_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._parse_dispatch_key(_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)
_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]

_lock = threading.Lock()
_libraries: list[Library] = []  # keep the registered kernels


class RandomMode(ABC):
    """Context manager that passes each random operation of this thread to :meth:`draw`."""

    def __init__(self) -> None:
        register()

    def __enter__(self) -> Self:
        self._outer = _thread.mode
        self._guard = torch._C._IncludeDispatchKeyGuard(_KEY)
        self._guard.__enter__()
        _thread.mode = self
        return self

    def __exit__(self, *raised: object) -> None:
        _thread.mode = self._outer
        self._guard.__exit__(*raised)

    @abstractmethod
    def draw(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a random operation and return its result. Operations that it calls are not intercepted."""


class _Thread(threading.local):
    """The innermost mode of the calling thread."""

    mode: RandomMode | None = None


_thread = _Thread()


def register() -> None:
    """Register the kernels of random operations, once in a process. Called before threads run the operations."""
    with _lock:
        if _libraries:
            return
        libraries = {"_": Library("_", "IMPL")}
        libraries["_"].fallback(fallthrough_kernel, _NAME)
        for schema in torch._C._jit_get_all_schemas():
            namespace, _, name = schema.name.partition("::")
            found = torch._C._get_operation_overload(schema.name, schema.overload_name)
            if found is None or torch.Tag.nondeterministic_seeded not in found[2]:
                continue
            overload = schema.overload_name or "default"
            qualified = f"{schema.name}.{schema.overload_name}".rstrip(".")
            if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"):
                continue  # it calls others that draw
            if namespace not in libraries:
                libraries[namespace] = Library(namespace, "IMPL")
            operation = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            libraries[namespace].impl(qualified.partition("::")[2], _kernel_of(operation), _NAME)
        _libraries.extend(libraries.values())


def _kernel_of(operation: Any) -> Callable[..., Any]:
    """Return the kernel of a random operation within a mode."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            # While torch.compile traces, nothing is drawn yet: the compiled code calls the operation again.
            if any(map(torch._C._get_dispatch_mode, _TRACING)):
                return operation(*args, **kwargs)
            # Torch passes the key on to its threads, which run the backwards of devices.
            if _thread.mode is None:
                raise RuntimeError(
                    f"{operation.name()} draws in a backward that a layer runs within its forward. Draw in the forward"
                )
            return _thread.mode.draw(operation, args, kwargs)

    return kernel
