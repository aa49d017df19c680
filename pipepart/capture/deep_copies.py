"""Makes deep copies of modules, including TorchScript modules, that share nothing with the original."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def deep_copies(*things: Any) -> tuple[Any, ...]:
    """Copy modules and other objects. Objects that they share with each other are shared by the copies.

    ``copy.deepcopy`` alone clones the parameters of TorchScript layers under autograd: a backward of the copy would
    add to the gradients of the original.

    Raises:
        Exception: an object that cannot be copied raises it.
    """
    with torch.no_grad():
        copies = copy.deepcopy(things)
    for thing, copied in zip(things, copies, strict=True):
        if isinstance(thing, nn.Module):
            for theirs, mine in zip(thing.parameters(), copied.parameters(), strict=True):
                mine.requires_grad_(theirs.requires_grad)
    return copies
