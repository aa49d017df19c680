"""Detects in-place writes into messages, which autograd cannot track from one stage to another.

Two kinds of writes would change numbers without an error:

- A message holds a tensor and a view of it, and the next stage writes into one of them. Without stages autograd sends
  the gradient of the view through the write. The leaves of the next stage do not know of each other.
- A stage returns memory that it keeps, such as a buffer, and overwrites it for a later micro-batch while the next stage
  still needs the message.

Both show in the tensors' version counters, which views, detached tensors and their base share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .own_copy import tensors

_SENT = "_pipepart_sent_version"


def version(tensor: Tensor | None) -> int:
    """Return a tensor's count of in-place writes; 0 if torch does not count them."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def note_sent(tensor: Tensor) -> None:
    """Store the version counter of a tensor when it leaves its stage, if torch counts."""
    if not tensor.is_inference():
        tensor._pipepart_sent_version = tensor._version  # type: ignore


def check_not_overwritten(parts: Sequence[Tensor]) -> None:
    """Check that tensors were not written after :func:`note_sent`. Copies are not checked.

    Raises:
        RuntimeError: a tensor was written.
    """
    for tensor in parts:
        sent = getattr(tensor, _SENT, None)
        if sent is not None and sent != tensor._version:
            raise _overwritten()


# An empty tensor that shares a version counter, and the version that was sent.
VersionCounter = tuple[Tensor, int]


def sent_counters(message: Any) -> Sequence[VersionCounter]:
    """Return the version counters stored by :func:`note_sent`, without holding the tensors' memory.

    For the receiver of a copy, whose own counters say nothing of the original.
    """
    counters = []
    for tensor in tensors(message):
        sent = getattr(tensor, _SENT, None)
        if sent is not None and tensor.layout is torch.strided and not tensor.is_inference():
            counter = tensor.detach()
            counter.data = tensor.new_empty(0)  # leaves the counter as it is
            counters.append((counter, sent))
    return counters


def check_counters(counters: Sequence[VersionCounter]) -> None:
    """Check that a message was not written between :func:`note_sent` and the arrival of its copy.

    Raises:
        RuntimeError: a tensor of the message was written.
    """
    if any(counter._version != sent for counter, sent in counters):
        raise _overwritten()


def _overwritten() -> RuntimeError:
    return RuntimeError(
        "the input of this stage was overwritten after the stage before it had sent it: a layer there returns "
        "memory that it keeps and writes again for the next micro-batch, such as a buffer. Return a copy of it "
        "from the last layer of that stage, .clone()"
    )


def overlaps(parts: Sequence[Tensor]) -> Sequence[tuple[Tensor, int]]:
    """Return the tensors of a message that share a storage with another, and their versions."""
    if len(parts) < 2:
        return ()
    dense = {id(part): part for part in parts if part.layout is torch.strided and part.numel()}
    storages = {key: part.untyped_storage().data_ptr() for key, part in dense.items()}
    counts = Counter(storages.values())
    return [(part, version(part)) for key, part in dense.items() if counts[storages[key]] > 1]


def written(shared: Sequence[tuple[Tensor, int]]) -> bool:
    """Return True if a tensor was written that shares a storage with another."""
    return any(version(tensor) != noted for tensor, noted in shared)
