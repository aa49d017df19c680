"""Reads and sets the states of the random generators of Python, numpy and torch, as JSON values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of this process; those of CUDA devices if CUDA is in use."""
    return {
        "python": random.getstate(),
        "numpy": _without_arrays(np.random.get_state(legacy=False)),
        "torch": _to_bytes(torch.get_rng_state()),
        "cuda": [_to_bytes(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()
        else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a result of :func:`random_state`; of CUDA devices, as many as there are."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_to_tensor(state["torch"]))
    count = torch.cuda.device_count() if state["cuda"] else 0
    for number, one in enumerate(state["cuda"][:count]):
        torch.cuda.set_rng_state(_to_tensor(one), number)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _to_bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
