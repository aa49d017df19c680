"""A stand-in for CUDA graphs on the CPU: records the operations of a function and does them again on the same memory.

No Python of the function runs again, no operation asks a tensor for its value, and every result lands in the tensor
that the recording made: what reads a stale tensor, or one that another micro-batch has written, gets wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Operation = tuple[Any, Sequence[Any], dict[str, Any], Any]


class StandIn:
    """Records for one stage.

    Args:
        model: whose buffers a recording leaves alone, as a capture does, which computes nothing.

    Attributes:
        recordings: how many there are.
        replays: how many times they were replayed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.device = torch.device("cpu")
        self.recordings = 0
        self.replays = 0
        self._model = model

    def memory(self) -> object:
        return object()

    def record(self, work: Callable[[], None], memory: object) -> Callable[[], None]:
        self.recordings += 1
        operations: list[Operation] = []
        buffers = {buffer.data_ptr() for buffer in self._model.buffers()}
        with _Recording(operations, buffers) as recording:
            work()
        for buffer, value in recording.before.values():
            buffer.data.copy_(value)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for operation in operations:
                    _again(*operation)

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self, operations: list[Operation], buffers: set[int]) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._operations = operations
        self._buffers = buffers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        # As they are now: a later operation may change the shape of the tensors themselves.
        args_now, kwargs_now = _over_the_same_memory((args, kwargs or {}))
        for tensor in pytree.tree_leaves((args_now, kwargs_now)):
            if isinstance(tensor, Tensor) and tensor.data_ptr() in self._buffers - self.before.keys():
                self.before[tensor.data_ptr()] = tensor, tensor.clone()
        made = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view not in func.tags:
            self._operations.append((func, args_now, kwargs_now, _over_the_same_memory(made)))
        return made


def _over_the_same_memory(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, nest)


def _again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], before: Any) -> None:
    aliases = [result.alias_info for result in func._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return  # a view of what it was a view of
    made = func(*args, **kwargs)
    for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(made), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
