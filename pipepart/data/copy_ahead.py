"""Copies mini-batches to accelerators on streams of their own, while the devices compute.

::

    thread that loads      batch ──pin──▶ stream of the copies: copy ──▶ event
    caller's thread                       its current stream: waits for the event ──▶ step
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.own_copy import tensors
from ..input_error import InputError
from ..workers.streams import Wait, has_streams, on_streams, waits


class Copied(NamedTuple):
    """A mini-batch on its devices, once its events have passed."""

    batch: Any
    events: list[torch.Event]

    def arrived(self) -> Any:
        """Return the mini-batch; the calling thread's streams wait for its copies."""
        for event in self.events:
            waits.wait(Wait.CALLER_BEHIND_PREFETCH, torch.accelerator.current_stream(event.device), event)
        for tensor in _on_streams(self.batch):  # its memory belongs to the stream that it was copied on
            waits.hold(Wait.HELD_FOR_STEP, tensor, torch.accelerator.current_stream(tensor.device))
        return self.batch


class CopyAhead:
    """Copies the inputs of mini-batches to one device and their targets to another, if these are accelerators.

    Args:
        first: the device for inputs.
        last: the device for targets.
        target: index or key of the target in a mini-batch. By default the last entry of a tuple or list of several.
    """

    def __init__(self, first: torch.device, last: torch.device, target: int | str | None = None) -> None:
        self._first, self._last = first, last
        self._target = target
        self._streams = {device: torch.Stream(device) for device in {first, last} if has_streams(device)}

    def __call__(self, batch: Any) -> Copied:
        """Start the copies of one mini-batch.

        Raises:
            ValueError: the mini-batch has no such target.
        """
        loaded_on = {tensor.device for tensor in _on_streams(batch)}
        whole = id(batch)  # and not the batch itself, which a cycle of references in pytree would keep alive
        entries, spec = pytree.tree_flatten(batch, is_leaf=lambda one: id(one) != whole)
        keys = list(batch) if isinstance(batch, dict) else list(range(len(entries)))
        target = self._place_of_target(keys, isinstance(batch, tuple | list))
        batch = pytree.tree_unflatten(
            [self._to(self._last if i == target else self._first, entry) for i, entry in enumerate(entries)],
            spec,
        )
        events = [stream.record_event() for stream in self._streams.values()]
        events += [torch.accelerator.current_stream(device).record_event() for device in loaded_on]
        return Copied(batch, events)

    def _place_of_target(self, keys: list[Any], in_order: bool) -> int | None:
        if self._target is None:
            return len(keys) - 1 if in_order and len(keys) > 1 else None
        key = self._target
        key = key + len(keys) if in_order and isinstance(key, int) and key < 0 else key
        if key not in keys:
            raise InputError(
                f"prefetch(target={self._target!r}): a mini-batch of the loader has the entries {keys}"
            )
        return keys.index(key)

    def _to(self, device: torch.device, entry: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: self._copied(tensor, device), entry)

    def _copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device.type != "cpu" or device.type == "cpu":
            return tensor
        if device not in self._streams:
            return tensor.to(device)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with on_streams([self._streams[device]]):
            return pinned.to(device, non_blocking=True)


def _on_streams(nest: Any) -> Iterable[Tensor]:
    return [tensor for tensor in tensors(nest) if has_streams(tensor.device)]
