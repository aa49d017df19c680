"""Puts the buffers of a loss module, such as class weights, on the device of an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..autograd import graph_cut
from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from .refusal import LossError

_ORIGINAL = "_pipepart_original"


def original_of(tensor: Tensor) -> Tensor:
    """The buffer that a tensor is a copy of, made by :func:`buffers_on_device_of`; any other tensor itself."""
    return getattr(tensor, _ORIGINAL, tensor)


@contextmanager
def buffers_on_device_of(output: Any, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within the block the buffers of a loss module are on the output's device.

    The last stages of several replicas are on devices of their own, and call the same loss module one after another.

    Raises:
        LossError: the loss has written a buffer of which it had a copy.
    """
    outputs = tensors(output)
    if not outputs or not isinstance(function, nn.Module):
        yield
        return
    held = [
        (part._buffers, key, buffer, graph_cut.move(buffer, outputs[0].device))
        for part in function.modules()
        for key, buffer in part._buffers.items()
        if buffer is not None
    ]
    copied = [
        (owner, key, buffer, copy, version(copy)) for owner, key, buffer, copy in held if copy is not buffer
    ]
    for owner, key, buffer, copy, _ in copied:
        setattr(copy, _ORIGINAL, buffer)
        owner[key] = copy
    try:
        yield
        for owner, key, _, copy, before in copied:
            if owner[key] is not copy or version(copy) != before:
                raise LossError(
                    f"the loss writes its buffer {key!r}, and the last stages of the replicas have copies of it: plan "
                    "with replicas=1, or move the loss to the device of the last stage"
                )
    finally:
        for owner, key, buffer, _, _ in copied:
            owner[key] = buffer
