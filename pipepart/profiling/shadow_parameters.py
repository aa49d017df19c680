"""Stand-ins for a model's parameters and buffers, so that a profile leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..capture import untouched


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` runs on copies of its parameters and buffers.

    Gradients gather on the copies, layers that write into their state write into the copies, and what the user has
    hooked to a parameter or its gradient is not called. Each trained copy starts with a gradient of zeros, so that
    a backward adds to it as every micro-batch but the first does.
    """
    state: dict[Tensor, Tensor] = {parameter: _twin(parameter) for parameter in model.parameters()}
    state |= {buffer: buffer.clone() for buffer in model.buffers()}
    try:
        _exchange(model, state)
        with untouched(model):
            yield
    finally:
        _exchange(model, {twin: original for original, twin in state.items()})


def _exchange(model: nn.Module, tensors: dict[Tensor, Tensor]) -> None:
    # By setattr: a module may hold its parameters elsewhere too, as an LSTM does, and then sees to it there.
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor in tensors:
                setattr(module, name, tensors[tensor])


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = twin.new_zeros(twin.shape)
    return twin
