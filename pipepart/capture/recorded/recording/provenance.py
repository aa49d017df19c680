"""Tracks what the tensors of a recording depend on: arguments, random draws, and calls with value-dependent sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..refusal import SkeletonError, line_of_user
from ..replay.calls import Call
from ..replay.given import Ref
from .sizes import SizeOrigin


class Provenance:
    """The origins of recorded tensors, by tensor number.

    Attributes:
        arguments: those that can be computed from the model's arguments, before the first layer.
        drawn: those that can be computed from the arguments and from draws of random numbers.
    """

    def __init__(self) -> None:
        self.arguments: set[int] = set()
        self.drawn: set[int] = set()
        self._origins: dict[int, frozenset[SizeOrigin]] = {}

    def note(self, call: Call, leaves: Sequence[Any], own: bool) -> None:
        """Note the origins of a call's results.

        Args:
            call: the call.
            leaves: what it returned.
            own: whether it may return tensors of any size, as modules do.
        """
        numbers = set(call.given.numbers())
        known = not own and self.arguments.issuperset(numbers)
        drawn = not own and (self.arguments | self.drawn).issuperset(numbers)
        self.arguments -= call.writes
        if drawn and (call.draws or not known):
            self.drawn |= {out.number for out in call.outs if type(out) is Ref}
        elif not (known and call.draws):
            self.drawn -= call.writes
        before = frozenset[SizeOrigin]().union(
            *(self._origins.get(number, frozenset()) for number in numbers)
        )
        if len(call.new) > 1 and not own:  # so many parts as there are
            self._read(before)
        for out, leaf in zip(call.outs, leaves, strict=True):
            if type(out) is Ref and out.number in call.new:
                found = frozenset((SizeOrigin(call, out.number, leaf.shape),)) if own else before
                if found:
                    self._origins[out.number] = found
                if known and not call.draws and not call.writes:
                    self.arguments.add(out.number)

    def guard(self, call: Call, asking: Call) -> None:
        """Note that ``asking`` computes the sizes of a call's results. It is checked once the model reads a size."""
        asking.asked = False
        for number in call.new:
            self._origins[number] = self._origins.get(number, frozenset()) | {SizeOrigin(asking)}

    def read_size(self, number: int) -> None:
        """Note that the model has read the size of a tensor.

        Raises:
            SkeletonError: it depends on values that cannot be asked before the first layer.
        """
        self._read(self._origins.get(number, frozenset()))

    def _read(self, origins: frozenset[SizeOrigin]) -> None:
        for origin in origins:
            if origin.number is None and not self.arguments.issuperset(origin.call.given.numbers()):
                raise SkeletonError(
                    f"the size of a tensor made at {origin.call.line} depends on values that modules compute, and is "
                    f"read at {line_of_user()}: the code that follows may do other things for other values. Move that "
                    "code into a module of its own, or compute with masks (torch.where)"
                )
            origin.read()
