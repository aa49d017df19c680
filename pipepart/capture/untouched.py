"""Runs a model so that nothing of it is different afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back, after the block, the random states and what each module's attributes were bound to.

    Covers the states of torch, ``random`` and numpy, and attributes of every kind: parameters, buffers and what
    a ``forward`` binds, such as a counter. A value that is changed in place, as a list is by ``append``, stays so.
    """
    modules = list(model.modules())
    bound = [dict(vars(module)) for module in modules]
    tables = [(dict(module._parameters), dict(module._buffers)) for module in modules]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list({tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, attributes, (parameters, buffers) in zip(modules, bound, tables, strict=True):
                vars(module).clear()
                vars(module).update(attributes)
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
