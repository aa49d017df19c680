"""The modes of torch that belong to a thread, carried from the caller's to a worker's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Modes:
    """Gradients on or off, inference mode, and autocast by device type with its dtype."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def current(cls) -> Modes:
        """Those of the calling thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
            ),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes on another thread, within the block; autocast apart."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield

    def autocasting(self) -> AbstractContextManager[object]:
        """The caller's autocast, for forwards; a backward runs outside of it, as in a plain loop."""
        if not self.autocast:
            return _NOTHING
        stack = ExitStack()
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype))
        return stack


_NOTHING = nullcontext()
