"""What a stage keeps for its backward, with and without making some of it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .stage_plan import Recompute

RecomputeChoice = Literal["auto", "never", "except-last", "always"]

# What a stage may do, the quickest first.
MODES: Mapping[str, tuple[Recompute, ...]] = {
    "auto": ("never", "except-last", "always"),
    "never": ("never",),
    "except-last": ("except-last",),
    "always": ("always",),
}

_Bytes = TypeVar("_Bytes", int, float, NDArray[np.float64])


def kept_bytes(mode: Recompute, in_flight: int, stash: _Bytes, boundary: float) -> _Bytes:
    """The most that a stage keeps at once with so many micro-batches in flight.

    One that is made again is whole while its backward runs; with ``except-last`` the last micro-batch may be there as
    well.
    """
    whole = min(in_flight, {"never": in_flight, "except-last": 2, "always": 1}[mode])
    return whole * stash + (in_flight - whole) * boundary  # type: ignore[return-value]
