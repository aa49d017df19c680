"""A mini-batch that has been moved to its devices and split before the step that trains on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.sparse import record_stream
from ..runtime import has_streams, on_streams
from .split import MicroBatches, Splitter, Whole, micro_batches_of


class Prefetched:
    """The input or the target of a mini-batch that has been split, which ``step`` takes as it takes tensors.

    Functions of torch and tensors that it meets see the value: ``loss_fn(pipe(x), y)``, ``output.argmax(1) == y``. For
    all else there is ``value``.

    Attributes:
        value: what the loader gave, on the device where it is needed.
    """

    __slots__ = ("__weakref__", "_mini_batch", "value")

    def __init__(self, value: Any, mini_batch: MiniBatch) -> None:
        self.value = value
        self._mini_batch = mini_batch

    def __len__(self) -> int:
        """The number of samples."""
        return sum(self._mini_batch.parts.sizes)

    def __repr__(self) -> str:
        return f"<Prefetched {type(self.value).__name__} of {len(self)} samples>"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.value, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def parts_of(value: Any, target: Any, most: int, splitter: Splitter | None) -> MicroBatches:
        """The micro-batches: those made already of what was prefetched together, else split now.

        Raises:
            TypeError, ValueError: as :func:`pipepart.data.split.micro_batches_of` does.
        """
        prefetched = [one._mini_batch for one in (value, target) if isinstance(one, Prefetched)]
        for mini_batch in prefetched:
            mini_batch.arrive()
        if isinstance(value, Prefetched):
            made = value._mini_batch
            if made.is_of(value, target) and made.split_as == (most, splitter):
                return made.parts
            value = value.value
        if isinstance(target, Prefetched):
            target = target.value
        return micro_batches_of(value, target, most, splitter)


class MiniBatch:
    """A mini-batch in parts, and the copies to accelerators that are under way for it.

    What the caller gets holds it and is not held by it, so that all memory goes when the caller lets go.
    """

    def __init__(self, value: Any, target: Any, most: int, splitter: Splitter | None, copies: Copies) -> None:
        self.split_as = most, splitter
        with torch.inference_mode(False), torch.enable_grad(), copies.behind():
            self.parts = micro_batches_of(value, target, most, splitter)
        copies.hold((self.parts.inputs, self.parts.targets))
        self._whole = value, target
        self._given: list[weakref.ref[Prefetched]] = []
        self._copies = copies

    def given(self) -> tuple[Prefetched, Prefetched | None]:
        """What the caller gets, once: the input and the target, if there is one."""
        (value, target), self._whole = self._whole, (None, None)
        pair = Prefetched(value, self), None if target is None else Prefetched(target, self)
        self._given = [weakref.ref(one) for one in pair if one is not None]
        return pair

    def is_of(self, value: Any, target: Any) -> bool:
        """Whether these are what the caller got."""
        asked = [value] if target is None else [value, target]
        return len(asked) == len(self._given) and all(
            one is known() for one, known in zip(asked, self._given, strict=True)
        )

    def arrive(self) -> None:
        """Has the calling thread's stream of each accelerator, for which stages wait, wait for the copies to it."""
        self._copies.arrive()


class Copies:
    """Copies from the CPU to accelerators, on a stream of each beside those that compute.

    Args:
        streams: by device, those of mini-batches before this one; made where there are none yet.
    """

    def __init__(self, streams: dict[torch.device, torch.Stream]) -> None:
        self._streams = streams
        self._there: set[torch.device] = set()
        self._under_way: list[Tensor] = []
        self._events: list[torch.Event] = []

    def to(self, nest: Any, device: torch.device) -> Any:
        """The nest with its tensors copied to ``device``, by way of pinned memory to an accelerator."""
        marks, spec = pytree.tree_flatten(nest, is_leaf=lambda one: isinstance(one, Whole))
        moved = [
            Whole(self.to(one.value, device)) if isinstance(one, Whole) else self._tensor(one, device)
            for one in marks
        ]
        return pytree.tree_unflatten(moved, spec)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Puts the calling thread on the streams of the copies: what it makes of them there is made behind them."""
        for device in self._there & self._streams.keys():  # and behind what the loader has made there itself
            self._streams[device].wait_event(torch.accelerator.current_stream(device).record_event())
        with on_streams(list(self._streams.values())) if self._streams else nullcontext():
            yield
        self._events = [stream.record_event() for stream in self._streams.values()]

    def hold(self, nest: Any) -> None:
        """Has what was made behind the copies arrive with them."""
        self._under_way += [
            leaf
            for leaf in pytree.tree_leaves(nest)
            if isinstance(leaf, Tensor) and leaf.device in self._streams
        ]

    def arrive(self) -> None:
        """Has the calling thread's streams wait, once."""
        for event in self._events:
            torch.accelerator.current_stream(event.device).wait_event(event)
        for tensor in self._under_way:
            record_stream(tensor, torch.accelerator.current_stream(tensor.device))
        self._events, self._under_way = [], []

    def _tensor(self, leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            self._there.add(leaf.device)
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.device == device:
            return leaf
        if not has_streams(device):
            return leaf.to(device)
        pinned = leaf if leaf.is_pinned() else leaf.pin_memory()
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        with on_streams([self._streams[device]]):
            moved = pinned.to(device, non_blocking=True)
        self._under_way.append(moved)
        return moved
