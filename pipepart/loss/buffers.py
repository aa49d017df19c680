"""Calls a loss with copies of its buffers, such as class weights, on the device of the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..autograd import graph_cut
from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from .returned import LossError


def buffers_elsewhere(function: Any, output: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Map the buffers of a loss module that are not on the output's device to copies on that device.

    The last stages of several replicas are on devices of their own, and call the same loss module one after another.
    """
    if not isinstance(function, nn.Module) or not (leaves := tensors(output)):
        return {}
    moved = [
        (name, buffer, graph_cut.move(buffer, leaves[0].device)) for name, buffer in function.named_buffers()
    ]
    return {name: (buffer, copy) for name, buffer, copy in moved if copy is not buffer}


def call_with_buffers(
    function: Callable[..., Any], arguments: tuple[Any, ...], buffers: dict[str, tuple[Tensor, Tensor]]
) -> Any:
    """Call a loss with its buffers replaced by copies.

    Raises:
        LossError: it has written one of them.
    """
    if not buffers or not isinstance(function, nn.Module):
        return function(*arguments)
    copies = {name: copy for name, (_, copy) in buffers.items()}
    before = {name: version(copy) for name, copy in copies.items()}
    value = functional_call(function, copies, arguments)
    for name, (_, copy) in buffers.items():
        if copies[name] is not copy or version(copy) != before[name]:
            raise LossError(
                f"the loss writes its buffer {name!r}, and the last stages of the replicas have copies of it: plan "
                "with replicas=1, or move the loss to the device of the last stage"
            )
    return value
