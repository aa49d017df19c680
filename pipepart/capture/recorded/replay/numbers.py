"""Python numbers that a forward computes from the sizes or the values of tensors, with how they were computed.

A recorded loss divides by the number of samples of the micro-batch that was recorded. Replayed with that number as a
constant it could not be told from a constant of the user's, and the losses of micro-batches would be put together
wrongly. So such a number remembers where it comes from, and the loss reads it from its tensors again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


class Ref(NamedTuple):
    """A tensor of a recording, by its number."""

    number: int


class Source(NamedTuple):
    """How a number was computed.

    Attributes:
        operation: that gave it.
        operands: refs, numbers with a source, or constants.
        compared: called if it, or what is computed from it, is compared with a number; None for a size.
    """

    operation: Callable[..., Any]
    operands: tuple[Any, ...]
    compared: Callable[[], None] | None = None

    def note_decision(self) -> None:
        """Note that the number is compared with another one."""
        if self.compared is not None:
            self.compared()
        for operand in self.operands:
            if isinstance(operand, Integer | Real):
                operand.source.note_decision()

    def value(self, tensors: Mapping[int, Tensor]) -> Any:
        """Compute the number again from the tensors of a replay."""
        return self.operation(*(_value(operand, tensors) for operand in self.operands))

    def numbers(self, sizes: bool = True) -> set[int]:
        """Return the numbers of the tensors that it is computed from.

        Args:
            sizes: count tensors of which only the size was read.
        """
        found: set[int] = set()
        for operand in self.operands:
            if isinstance(operand, Ref) and (sizes or self.operation not in (extent, Tensor.numel)):
                found.add(operand.number)
            elif isinstance(operand, Integer | Real):
                found |= operand.source.numbers(sizes)
        return found


class Integer(int):
    """A whole number with its source."""

    source: Source

    @property
    def plain(self) -> int:
        """The number itself."""
        return int.__add__(self, 0)


class Real(float):
    """A floating point number with its source."""

    source: Source

    @property
    def plain(self) -> float:
        """The number itself."""
        return float.__add__(self, 0.0)


def with_source(value: Any, source: Source) -> Any:
    """Return the number with its source; any other value as it is."""
    kind = {int: Integer, float: Real}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made.source = source
    return made


def extent(tensor: Tensor, dimension: int) -> int:
    """Return the extent of a tensor in one dimension."""
    return tensor.shape[dimension]


def positions(tensor: Tensor, **options: Any) -> Tensor:
    """Return ``torch.arange(len(tensor), **options)``, as one call that modes of torch see."""
    if has_torch_function((tensor,)):
        return handle_torch_function(positions, (tensor,), tensor, **options)
    return torch.arange(len(tensor), **options)


def plain(value: Any) -> Any:
    """Return a number without its source; any other value as it is."""
    if isinstance(value, Integer | Real):
        return value.plain
    if type(value) is torch.Size:
        return torch.Size([plain(size) for size in value])
    return value


def _value(operand: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(operand, Ref):
        return tensors[operand.number]
    return operand.source.value(tensors) if isinstance(operand, Integer | Real) else operand


def _remembering(kind: type, name: str, operation: Callable[..., Any], swapped: bool) -> Any:
    plainly = getattr(kind, name)

    def arithmetic(self: Any, *others: Any) -> Any:
        result = plainly(self, *map(plain, others))
        operands = (*others, self) if swapped else (self, *others)
        return with_source(result, Source(operation, operands))

    return arithmetic


def _deciding(kind: type, name: str) -> Any:
    plainly = getattr(kind, name)

    def comparison(self: Any, *others: Any) -> Any:
        self.source.note_decision()
        return plainly(self, *others)

    return comparison


for _kind, _plain_kind in ((Integer, int), (Real, float)):
    for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
        _operation = getattr(operator, _name)
        setattr(_kind, f"__{_name}__", _remembering(_plain_kind, f"__{_name}__", _operation, False))
        setattr(_kind, f"__r{_name}__", _remembering(_plain_kind, f"__r{_name}__", _operation, True))
    _kind.__neg__ = _remembering(_plain_kind, "__neg__", operator.neg, False)
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_kind, _name, _deciding(_plain_kind, _name))
    setattr(_kind, "__hash__", _plain_kind.__hash__)  # noqa: B010 - a class with its own __eq__ loses it
