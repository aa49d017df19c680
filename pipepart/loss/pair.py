"""A loss that returns two numbers: the sum over its samples, and what the mean of the mini-batch divides by."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_pair(value: Any) -> bool:
    """Whether a loss has returned ``(sum, count)``: a scalar tensor, and a scalar tensor or a number."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    loss, count = value
    if not isinstance(loss, Tensor) or loss.dim():
        return False
    return not count.dim() if isinstance(count, Tensor) else isinstance(count, int | float)


def number(count: Tensor | float) -> float:
    """A count as a number.

    Raises:
        ValueError: it is negative or infinite.
    """
    found = float(count.detach()) if isinstance(count, Tensor) else float(count)
    if found < 0 or found == float("inf"):
        raise ValueError(f"the loss returned (sum, count) with count {found:g}: a count is 0 or more")
    return found
