"""Computes the values of deferred tensors from the log of their construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .log import Log, Memory, View
from .replay import replay


def values_of(tensors: Iterable[Tensor], deliver: Callable[[Tensor, Tensor], None]) -> None:
    """Compute the values of deferred tensors, one memory at a time.

    Args:
        tensors: some that :func:`refuse_unknown` let pass.
        deliver: called with each tensor and its values on the CPU, which are the receiver's. Tensors that share memory
            get values that share memory, one after the other.
    """
    wanted: dict[Log, dict[int, list[Tensor]]] = {}
    for tensor in tensors:
        memory = Memory.of(tensor)
        assert memory is not None
        wanted.setdefault(memory.log, {}).setdefault(memory.number, []).append(tensor)
    for log, memories in wanted.items():

        def hand_out(
            number: int, storage: torch.UntypedStorage, memories: dict[int, list[Tensor]] = memories
        ) -> None:
            for tensor in memories.pop(number):
                deliver(tensor, View.of(tensor, number).on(storage))

        replay(log, set(memories), hand_out)
