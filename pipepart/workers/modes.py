"""Copies the torch modes of the calling thread to the worker threads; raises an error for other modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_OWN = __name__.partition(".")[0] + "."  # pipepart's own modes are active if a layer calls a pipeline


@dataclass(frozen=True)
class Modes:
    """The thread-local modes of torch. (The engine copies Python's ``contextvars``.)

    Attributes:
        grad: whether gradients are enabled.
        inference: whether inference mode is on.
        autocast: its dtype by device type, where it is on.
        autocast_cache: whether autocast keeps casts of weights.
        multithreading: whether a backward may use threads of autograd, one for each device.
        default_devices: of ``torch.set_default_device`` and ``with torch.device(...)``, the outermost first.
        saved_hooks: the innermost ``saved_tensors_hooks``, such as those of ``save_on_cpu``.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_devices: tuple[DeviceContext, ...] = ()
    saved_hooks: tuple[Any, Any] | None = None
    autocast_cache: bool = True
    multithreading: bool = True

    @classmethod
    def current(cls) -> Modes:
        """Return the modes of the calling thread.

        Raises:
            RuntimeError: a mode that intercepts each operation is active, such as FlopCounterMode. It cannot intercept
                several threads.
        """
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        function_modes = _get_current_function_mode_stack()
        _refuse([mode for mode in function_modes if not isinstance(mode, DeviceContext)])
        _refuse(_get_current_dispatch_mode_stack())
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
            ),
            default_devices=tuple(mode for mode in function_modes if isinstance(mode, DeviceContext)),
            saved_hooks=_top_saved_tensors_default_hooks(True),
            autocast_cache=torch.is_autocast_cache_enabled(),
            multithreading=torch._C._is_multithreading_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the same modes on another thread, except autocast."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self.multithreading))
            for mode in self.default_devices:
                _push_mode(mode)
                stack.callback(_pop_mode)
            if self.saved_hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_hooks))
            yield

    def autocasting(self) -> AbstractContextManager[object]:
        """Return the caller's autocast context for forwards. Backwards run outside of it, as in a plain loop."""
        if not self.autocast:
            return _NOTHING
        stack = ExitStack()
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.autocast_cache))
        return stack


def _refuse(modes: list[Any]) -> None:
    for mode in modes:
        if not type(mode).__module__.startswith(_OWN):
            raise RuntimeError(
                f"{type(mode).__name__} is active on the calling thread, but the layers of a pipeline run on worker "
                "threads, where it would see nothing: leave it around this call, or use it on the plain model, "
                "pipe.module"
            )


_NOTHING = nullcontext()
