"""Deep copies of modules, TorchScript ones included."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def deep_copies(*things: Any) -> tuple[Any, ...]:
    """Copies of modules and other things, which share among themselves what the things share, and nothing with them.

    ``copy.deepcopy`` by itself clones the parameters of TorchScript layers under autograd, so that a backward of the
    copy would add to the gradients of the first.

    Raises:
        Exception: whatever a part raises that cannot be copied.
    """
    with torch.no_grad():
        copies = copy.deepcopy(things)
    for thing, copied in zip(things, copies, strict=True):
        if isinstance(thing, nn.Module):
            for theirs, own in zip(thing.parameters(), copied.parameters(), strict=True):
                own.requires_grad_(theirs.requires_grad)
    return copies
