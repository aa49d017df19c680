"""How much longer a backward takes that runs in two parts."""

from __future__ import annotations

import numpy as np

from .stage_memory import Floats


def split_share(split: Floats | float, backward: Floats | float) -> Floats:
    """Return the time of I and W together as a share of the full backward; 1 for a stage without a backward.

    Args:
        split: seconds that I and W take more than the full backward; negative if they take less.
        backward: seconds of the full backward.
    """
    extra = np.asarray(split, dtype=np.float64)
    of_backward = np.divide(extra, backward, np.zeros_like(extra), where=np.asarray(backward) > 0)
    return np.maximum(0.0, 1 + of_backward)
