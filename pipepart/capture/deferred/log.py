"""The log of a construction: the operations that give each memory of the model its values, in their order.

Tensors on the meta device have storages of a size, but without bytes. Views, ``.data`` and ``nn.Parameter`` share the
storage of their tensor. So the log knows memories only, not tensors::

    nn.Linear(2, 3)          memory 0: 24 bytes      uniform_(view of 0)          draw
    torch.arange(4.0) / 4    memory 1, memory 2      1 = arange; 2 = div(view of 1)
    model.half()             memory 3: 12 bytes      3 = _to_copy(view of 0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_MARK = "_pipepart_memory"


class Memory:
    """The storage of a tensor on the meta device, whose values come from a log.

    Attributes:
        log: of the construction.
        number: in the log.
    """

    __slots__ = ("log", "number")

    def __init__(self, log: Log, number: int) -> None:
        self.log = log
        self.number = number

    @classmethod
    def of(cls, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor; None if no log has it."""
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer) or not tensor.is_meta:
            return None
        if tensor.layout is not torch.strided:
            return None
        try:
            return getattr(tensor.untyped_storage(), _MARK, None)
        except NotImplementedError:  # within torch.vmap
            return None


class View(NamedTuple):
    """A tensor, as a window onto a memory."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, memory: int) -> View:
        """Describe a tensor of this memory."""
        size, stride = tuple(tensor.shape), tensor.stride()
        offset, dtype = int(tensor.storage_offset()), tensor.dtype
        return cls(memory, size, stride, offset, dtype, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor on a storage with bytes."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        made = torch.ops.aten._conj(made) if self.conj else made
        return torch.ops.aten._neg_view(made) if self.neg else made

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.size).numel()

    def covers(self, nbytes: int) -> bool:
        """Return True if every byte of a memory of this size belongs to one element."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.numel * self.dtype.itemsize == nbytes


class GeneratorRef(NamedTuple):
    """A random generator among the arguments of an operation, by its number in the log."""

    number: int


class Constant(NamedTuple):
    """Data that the construction was given: its memory gets a copy.

    Attributes:
        source: the memory of an array that ``data`` was copied from, and that may change; None if there is none.
    """

    view: View
    data: Tensor
    source: Tensor | None = None

    @property
    def changed(self) -> bool:
        """Whether the array has other values now."""
        return self.source is not None and not torch.equal(_bytes(self.source), _bytes(self.data))


class Seeding(NamedTuple):
    """A generator was seeded, or set back to where it was after an earlier operation.

    Attributes:
        generator: its number.
        state: the new state, or the position in the log of the draw after which it was in that state.
    """

    generator: int
    state: Tensor | int


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation of the construction.

    Attributes:
        func: of the dispatcher.
        args, kwargs: with views in place of tensors.
        reads: the memories whose values it needs.
        writes: the memories that it changes or makes.
        kills: those of ``writes`` whose earlier values it does not need.
        made: the tensors in memories that it makes, by their place among its results.
        generator: the number of the generator that it draws from; None if it draws nothing.
        fills: whether it draws as much whatever the values of its arguments are.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    kills: frozenset[int]
    made: tuple[tuple[int, View], ...] = ()
    generator: int | None = None
    fills: bool = False


Entry = Operation | Constant | Seeding


@dataclass(eq=False)
class Log:
    """What happened while a model was constructed.

    Attributes:
        entries: in their order.
        sizes: of the memories, in bytes.
        generators: those that were drawn from. The first is torch's default.
    """

    entries: list[Entry] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=lambda: [torch.default_generator])

    def memory_of(self, tensor: Tensor) -> int | None:
        """Return the number of the memory of a tensor; None if this log does not have it."""
        known = Memory.of(tensor)
        if known is None or known.log is not self:
            return None
        self.sizes[known.number] = max(self.sizes[known.number], tensor.untyped_storage().nbytes())
        return known.number

    def new_memory(self, tensor: Tensor) -> View:
        """Give the storage of a tensor on the meta device a memory in this log."""
        number = len(self.sizes)
        storage = tensor.untyped_storage()
        self.sizes.append(storage.nbytes())
        # The mark owns the log and not the other way round, so a log lives as long as a tensor that needs it.
        setattr(storage, _MARK, Memory(self, number))
        return View.of(tensor, number)

    def view_of(self, tensor: Tensor) -> View:
        """Describe a tensor whose memory this log has."""
        number = self.memory_of(tensor)
        assert number is not None
        return View.of(tensor, number)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which differ for values that do, and not for NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)
