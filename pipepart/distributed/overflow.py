"""Checks gradients for infinities and NaN, with one synchronization per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def overflows(gradients: Iterable[Tensor]) -> bool:
    """Return True if any gradient contains an infinity or NaN."""
    finite: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        finite[gradient.device].append(gradient.isfinite().all())
    return not all(bool(torch.stack(of_device).all()) for of_device in finite.values())
