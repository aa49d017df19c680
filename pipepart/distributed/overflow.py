"""Tells all ranks of gradients that overflow on one, so that every ``GradScaler`` skips the same steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ranks import Ranks


def share_overflow(ranks: Ranks, gradients: Sequence[Tensor]) -> None:
    """Write an infinity into the gradients of this rank if those of another rank are not finite. All call this."""
    finite: defaultdict[torch.device, list[Tensor]] = defaultdict(list)  # for one synchronization a device
    for gradient in gradients:
        finite[gradient.device].append(gradient.isfinite().all())
    overflow = not all(bool(torch.stack(of_device).all()) for of_device in finite.values())
    if any(ranks.exchange(overflow)) and gradients and not overflow:
        gradients[0].view(-1)[:1] = float("inf")
