"""Answers a constructor that its tensors are on the CPU, although they are deferred; computes values that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..recorded.refusal import CaptureError, line_of_user
from .recorder import Recorder

_SEEN: dict[Any, Any] = {
    Tensor.device: torch.device("cpu"),  # type: ignore[dict-item]
    Tensor.is_meta: False,  # type: ignore[dict-item]
    Tensor.is_cpu: True,  # type: ignore[dict-item]
}
_DATA = frozenset({torch.asarray, torch.frombuffer, torch.from_file})  # views of memory that exists
_VALUES = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__})


class FakedDevice(TorchFunctionMode):
    """Answers for deferred tensors what the plain construction would have found.

    Args:
        recorder: computes values.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if str(device) == "meta":  # as of torch.nn.utils.skip_init
            return self._on_meta(func, args, kwargs)
        _kept_on_meta(device)  # refuses other devices
        if func in _DATA and not isinstance(args[0], Tensor):
            with _disable_current_modes():
                return self._recorder.constant(func(*args, **kwargs))
        if not args or not self._recorder.has(args[0]):
            return func(*args, **kwargs)
        attribute = getattr(func, "__self__", None)
        if attribute in _SEEN and func.__name__ == "__get__":
            return _SEEN[attribute]
        if torch.is_autocast_enabled("cpu"):
            raise CaptureError(
                f"deferred_init cannot follow autocast, under which {line_of_user()} runs: construct outside of it"
            )
        if func is Tensor.to:
            args = tuple(map(_kept_on_meta, args))
            kwargs = {name: _kept_on_meta(value) for name, value in kwargs.items()}
        elif func is Tensor.cpu:
            return args[0]
        elif func is Tensor.new_tensor:
            kwargs.setdefault("dtype", args[0].dtype)
            return torch.tensor(*args[1:], **kwargs)
        elif func is Tensor.data_ptr:
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
        elif func in _VALUES:
            return self._of_values(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_meta(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._recorder.keeps_meta = True
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.keeps_meta = False

    def _of_values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            real = self._recorder.computed(args[0])
            result = func(real, *args[1:], **kwargs)
        if func is Tensor.numpy or func is Tensor.__array__:
            result.setflags(write=False)  # a write would not reach the model
        return result


def _kept_on_meta(leaf: Any) -> Any:
    """Return the meta device in place of the CPU; values that are no device as they are.

    Raises:
        CaptureError: another device.
    """
    if not isinstance(leaf, str | torch.device):
        return leaf
    if torch.device(leaf).type not in ("cpu", "meta"):
        raise CaptureError(
            f"deferred_init constructs a model for the CPU, and {line_of_user()} puts a tensor on {leaf!s}: leave it "
            "out, the pipeline puts each stage on its device"
        )
    return torch.device("meta")
