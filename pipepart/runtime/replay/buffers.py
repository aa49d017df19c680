"""Buffers of recomputed layers: both forwards read the same values, and only the first forward updates them.

A BatchNorm updates its running statistics in the forward; a second forward of the same micro-batch must not update them
again. If a layer's output depends on its buffers, it must not read the updates of later micro-batches either. So the
second forward uses copies that were taken before the first, in place of the real buffers.

Only buffers that a forward writes need copies. The first micro-batch of each mode (which modules train) copies all
buffers and compares their values afterwards, because torch does not count every write in a tensor's version, for
example those of BatchNorm. Later micro-batches copy the buffers that the first one wrote. If they write another one,
which shows in its version, their forward is not repeated. Neither is a forward that adds or removes a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...autograd.in_place import version
from ...autograd.sparse import dense_parts

_Key = tuple[int, str]
_Mode = tuple[bool, ...]  # for each module, whether it is in training mode
_Present = dict[_Key, tuple[Tensor | None, int]]  # each buffer with its version
Values = dict[_Key, Tensor | None]


class Noted(NamedTuple):
    """The buffers before a first forward, and copies of those that it may write."""

    mode: _Mode
    present: _Present
    copies: Values


class Buffers:
    """The buffers of a stage's layers. Used by the stage's worker only."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        parts = {part: name for prefix, layer in layers for name, part in layer.named_modules(prefix=prefix)}
        self._names = list(parts.values())
        self._owners: list[MutableMapping[str, Tensor | None]] = [part._buffers for part in parts]
        self._parts = list(parts)
        self._written: dict[_Mode, set[_Key]] = {}

    def note(self) -> Noted:
        """Record the buffers before a first forward."""
        mode, present = self._mode(), self._present()
        written = self._written.get(mode, present)
        originals = {key: tensor for key, (tensor, _) in present.items() if key in written}
        # By identity, so that one buffer under two names stays one.
        noted = {tensor: tensor.detach().clone() for tensor in originals.values() if tensor is not None}
        copies: Values = {key: None if tensor is None else noted[tensor] for key, tensor in originals.items()}
        return Noted(mode, present, copies)

    def values(self, noted: Noted) -> Values | None:
        """Return the copies that the second forward needs, after the first; None if it is not to be repeated."""
        now = self._present()
        if now.keys() != noted.present.keys():
            return None
        written = self._written.setdefault(noted.mode, set())
        changed = {key for key in now if key not in written and _changed(key, noted, now)}
        written |= changed
        if not changed <= noted.copies.keys():
            return None
        return {key: noted.copies[key] for key in written if key in noted.copies}

    def written(self, noted: Noted) -> list[str]:
        """Return the names of buffers that were written by forwards which were expected to write none."""
        self._written.setdefault(noted.mode, set())
        now = self._present()
        return [
            f"{self._names[key[0]]}.{key[1]}" for key in {**noted.present, **now} if _changed(key, noted, now)
        ]

    @contextmanager
    def replaced(self, values: Values) -> Iterator[None]:
        """Use the copies in place of the buffers within the block.

        Raises:
            RuntimeError: the block has written a real buffer; or a later micro-batch is the first one to write a
                buffer, of which there is no copy.
        """
        mode = self._mode()
        late = self._written.get(mode, set()) - values.keys()
        if not values and not late:
            yield
            return
        real = self._present()
        for key in late & real.keys():
            raise RuntimeError(
                f"buffer {self._names[key[0]]}.{key[1]} was first written by a later micro-batch, and a second "
                "forward needs its value of before: write it in every forward, or plan with recompute='never'"
            )
        for (number, name), tensor in values.items():
            self._owners[number][name] = tensor
        try:
            yield
        finally:
            for (number, name), (tensor, _) in real.items():
                self._owners[number][name] = tensor
        for (number, name), (tensor, before) in real.items():
            if version(tensor) != before:
                raise RuntimeError(
                    f"buffer {self._names[number]}.{name} was written in a second forward by another name than its "
                    "own, and so updated twice: write it as an attribute of its module, or plan with recompute='never'"
                )

    def _mode(self) -> _Mode:
        return tuple(part.training for part in self._parts)

    def _present(self) -> _Present:
        return {
            (number, name): (tensor, version(tensor))
            for number, owner in enumerate(self._owners)
            if owner
            for name, tensor in owner.items()
        }


def _changed(key: _Key, noted: Noted, now: _Present) -> bool:
    if key not in now or key not in noted.present:
        return True
    (tensor, after), (old, before) = now[key], noted.present[key]
    if tensor is not old or after != before:
        return True
    copy = noted.copies.get(key)
    return isinstance(copy, Tensor) and tensor is not None and not _equal(copy, tensor)


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.layout is torch.strided:
        return torch.equal(first, second)
    alike = first.layout == second.layout and first.shape == second.shape
    return alike and all(map(torch.equal, dense_parts(first), dense_parts(second)))
