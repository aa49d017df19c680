"""Finds the calls that a value is computed from, and computes it again outside of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ..placing import together
from .calls import Call, is_plain_function
from .given import Env, same_value


class Subgraph(NamedTuple):
    """Some calls of a recording, in order.

    Attributes:
        calls: the calls.
        outer: the numbers of the tensors that they need and do not make: of arguments, parameters, buffers, constants.
    """

    calls: list[Call]
    outer: set[int]

    @classmethod
    def of(cls, numbers: Iterable[int], calls: Sequence[Call]) -> Subgraph:
        """Return the calls that compute some tensors, with all calls that these depend on.

        Args:
            numbers: of the tensors.
            calls: of the recording, as far as it goes.
        """
        makers = {number: call for call in calls for number in call.new}
        waiting, reached, outer = [*numbers], set[Call](), set[int]()
        while waiting:
            number = waiting.pop()
            call = makers.get(number)
            if call is None:
                outer.add(number)
            elif call not in reached:
                reached.add(call)
                waiting += call.given.numbers()
        return cls([call for call in calls if call in reached], outer)

    def is_pure(self, written: set[int]) -> bool:
        """Return True if no call is a module, draws or writes, and no used tensor is written."""
        used = {number for call in self.calls for number in call.given.numbers()} | self.outer
        return all(map(is_plain_function, self.calls)) and used.isdisjoint(written)


def gives_the_same(calls: Iterable[Call], env: Env) -> bool:
    """Run calls again and store their tensors; return False if a call reads another value than in the recording."""
    for call in calls:
        args, kwargs = together(call.given.filled(env))
        for out, leaf in zip(call.outs, pytree.tree_leaves(call.func(*args, **kwargs)), strict=True):
            if isinstance(leaf, Tensor):
                env[out.number] = leaf
            elif not same_value(out, leaf):
                return False
    return True
