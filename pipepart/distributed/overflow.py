"""Finds gradients that are not finite, with one wait for each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def overflows(gradients: Iterable[Tensor]) -> bool:
    """Return whether any of the gradients has an infinity or NaN."""
    finite: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        finite[gradient.device].append(gradient.isfinite().all())
    return not all(bool(torch.stack(of_device).all()) for of_device in finite.values())
