"""What comes to a device from another or from the caller: it is copied, and lives where it is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...autograd import graph_cut
from ...loss import Added
from ..loss_sink import End
from ..own_copy import own_copy, tensors
from ..transport.base import ForwardingTransport, Key, Transport
from .watch import Watch


class Here(threading.local):
    """What watches over the present thread.

    Attributes:
        watch: of the worker; None on any other thread.
    """

    watch: Watch | None = None

    def arrived(self, message: Any) -> Any:
        """The message as it is taken on this thread: on a worker's, a copy on its device unless it lives there."""
        watch = self.watch
        if watch is None or all(map(watch.is_home, tensors(message))):
            return message
        with watch.off():
            copied = own_copy(message)
        for tensor in tensors(copied):
            if not watch.is_home(tensor):  # two tensors may share memory
                watch.adopt(tensor, what="a message with a tensor")
        return copied


class StrictTransport(ForwardingTransport):
    """Copies each message to the device of whoever takes it."""

    def __init__(self, inner: Transport, here: Here) -> None:
        super().__init__(inner)
        self._here = here

    def recv(self, receiver: int, key: Key) -> Any:
        """The message on the worker's device."""
        return self._here.arrived(super().recv(receiver, key))


class Arriving(Sequence[Any]):
    """Parts of a mini-batch, each copied to the device of whoever takes it."""

    def __init__(self, parts: Sequence[Any], here: Here) -> None:
        self._parts = parts
        self._here = here

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Arriving: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Arriving(self._parts[index], self._here)
        return self._here.arrived(self._parts[index])


class StrictEnd:
    """An end whose gradients are copied to the device that goes on with them."""

    def __init__(self, inner: End, here: Here) -> None:
        self._inner = inner
        self._here = here
        self.can_wait = inner.can_wait

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """As the other end."""
        return self._inner.receive(micro_batch, value)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Those of the other end, on the worker's device."""
        return self._here.arrived(self._inner.gradients(micro_batch))

    def needs_all(self, micro_batch: int) -> bool:
        """As the other end."""
        return self._inner.needs_all(micro_batch)

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """As the other end."""
        return self._inner.receive_added(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Those of the other end, on the worker's device."""
        return self._here.arrived(self._inner.added_gradients(stage, micro_batch))

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """As the other end."""
        return self._inner.losses()
