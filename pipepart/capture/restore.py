"""Runs a model so that nothing of it is different afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back, after the block, the random states and what each module's attributes were bound to.

    Covers the states of torch, ``random`` and numpy, and attributes of every kind: parameters, buffers and what
    a ``forward`` binds, such as a counter. A value that is changed in place, as a list is by ``append``, stays so.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(
        {tensor.device for tensor in model.parameters() if tensor.device.type not in ("cpu", "meta")}
    )
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind), bindings_kept(model):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def bindings_kept(model: nn.Module) -> Iterator[None]:
    """Puts back, after the block, what each module's attributes, parameters and buffers were bound to."""
    before = [
        [(table, dict(table)) for table in (vars(module), module._parameters, module._buffers)]
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for tables in before:
            for table, bound in tables:
                _put_back(table, bound)


def _put_back(table: MutableMapping[str, Any], bound: dict[str, Any]) -> None:
    """Binds again what is bound to something else, and nothing more: some modules refuse to be written to."""
    now = dict(table)
    for name in now.keys() - bound.keys():
        del table[name]
    for name, value in bound.items():
        if name not in now or now[name] is not value:
            table[name] = value
