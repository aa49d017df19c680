"""Makes the tensors that enter and leave a stage plain: torch's tensor parallelism returns some that still arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def wait_at_borders(first: nn.Module, last: nn.Module) -> None:
    """Have the output of a stage, and the gradients of its input, be there when the stage passes them on.

    Args:
        first, last: the layers of the stage with these places.
    """
    first.register_forward_pre_hook(_wait_for_gradients, prepend=True, with_kwargs=True)
    last.register_forward_hook(_wait_for_output)


def _wait_for_gradients(module: nn.Module, args: Any, kwargs: Any) -> None:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(_arrived)


def _wait_for_output(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(Tensor, _with_graph, output)


def _with_graph(tensor: Tensor) -> Tensor:
    return _Arrived.apply(tensor) if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[no-any-return]


def _arrived(tensor: Any) -> Tensor:
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


class _Arrived(torch.autograd.Function):
    """The tensor that an ``AsyncCollectiveTensor`` holds, once it is there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _arrived(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
