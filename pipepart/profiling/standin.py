"""Stand-ins for a model's parameters and buffers, so that a profile leaves no trace in the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` runs on parameters of its own memory but not of its identity, and on copied buffers.

    Gradients gather on the stand-ins, and so do calls of hooks that the user has set on a parameter or its
    gradient accumulation: nothing of that reaches the model. Each trained stand-in starts with a gradient of
    zeros, so that a backward adds to it as every micro-batch but the first does. Random states are restored.
    """
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    homes: list[tuple[nn.Module, str, Tensor]] = []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list({t.device for t in model.parameters() if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        homes.append((module, name, parameter))
                        setattr(module, name, parameters.setdefault(id(parameter), _twin(parameter)))
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None:
                        homes.append((module, name, buffer))
                        setattr(module, name, buffers.setdefault(id(buffer), buffer.clone()))
            yield
        finally:
            for module, name, original in homes:
                setattr(module, name, original)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.zeros_like(twin)
    return twin
