"""Checks the values that code between modules reads from tensors: a replay must read the same values.

::

    if mask.all():                    of an argument: asked again before each replay
    if torch.rand([]) < 0.1:          drawn: refused, unless it never happens
    position = int(self.position)     of a buffer that the forward writes: refused
    scale = float(x.max())            a number that modules compute: refused
    if torch.isnan(x).any():          a truth that modules compute: checked at each replay
    return loss, {"loss": loss.item()}   returned as it is, and no call follows: read again at each replay
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....generators import draws_undone
from ..refusal import SkeletonError, line_of_user
from ..replay.calls import Call
from ..replay.given import Reading, Ref
from ..replay.subgraph import Subgraph, gives_the_same
from .tensor_numbers import TensorNumbers

_NUMBERS = (int, float, complex)
_DRAWS = 64  # of a value, to find out whether it changes
_MOVE = "Move that code into a module of its own, which is called as it is"


class _Read(NamedTuple):
    """A call that reads, and the path of the open module whose forward does."""

    call: Call
    within: str


class Reads:
    """The values that one forward reads.

    Args:
        opened: the modules whose forward is recorded, by their paths.
        calls: of the recording so far.
        tensors: their numbers.
    """

    def __init__(
        self, opened: Mapping[str, nn.Module], calls: Sequence[Call], tensors: TensorNumbers
    ) -> None:
        self._opened = {id(module): path for path, module in opened.items()}
        self._calls, self._tensors = calls, tensors
        self._found: list[_Read] = []

    def note(self, call: Call) -> None:
        """Note a call that reads.

        Raises:
            SkeletonError: what it reads is a matter of chance.
        """
        self._found.append(_Read(call, self._reader()))
        if self._is_chance(call):
            raise SkeletonError(
                f"{call.name}() at {line_of_user()} reads a value that is drawn: a replay would take the way of the "
                f"forward that was recorded. Switch it off, as by layerdrop=0. {_MOVE}"
            )

    def are_of_arguments(self, numbers: Iterable[int]) -> bool:
        """Return True if tensors can be computed from the model's arguments and constants, before the first layer."""
        needed = Subgraph.of(numbers, self._calls)
        written = {number for call in self._calls for number in call.writes}
        return needed.is_pure(written) and needed.outer <= self._known.keys()

    def is_read(self, value: Any) -> bool:
        """Return True for a number that a call has read from a tensor."""
        return type(value) in _NUMBERS and any(value is out for call, _ in self._found for out in call.outs)

    def output(self, leaves: Sequence[Any], written: set[int]) -> list[Any]:
        """Check the reads at the end of a forward.

        Args:
            leaves: what the model returned, with refs in place of tensors.
            written: numbers of the parameters and buffers that were written.

        Returns:
            The leaves, with readings in place of the numbers that a replay reads again.

        Raises:
            SkeletonError: a replay would read something else.
        """
        values = list(leaves)
        followed = _followed_by_calls(self._calls, {leaf.number for leaf in leaves if type(leaf) is Ref})
        for call, within in self._found:
            numbers = set(call.given.numbers())
            if self.are_of_arguments(numbers):
                continue
            needed, outer = Subgraph.of(numbers, self._calls)
            if outer & written:
                raise _refused(call, within, "of a buffer that the forward writes")
            read = [out for out in call.outs if type(out) in _NUMBERS]
            if not read or not any(each.module for each in needed):
                continue
            places = [place for place, leaf in enumerate(leaves) if leaf is read[0]]
            is_known = len(places) == 1 or (places and type(read[0]) is float)  # equal ints may be one object
            if call in followed or not is_known or not len(call.outs) == len(numbers) == 1:
                raise _refused(call, within, "that modules compute")
            call.asked = False
            for place in places:
                values[place] = Reading(call.func, call.given.only)
        return values

    def _reader(self) -> str:
        """Return the path of the innermost open module whose code is running."""
        frame = sys._getframe(2)
        while frame is not None:
            path = self._opened.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    @property
    def _known(self) -> dict[int, Tensor]:
        return self._tensors.inputs | self._tensors.constants

    def _is_chance(self, call: Call) -> bool:
        """Return True if a call reads what is computed from draws and arguments, and changes from draw to draw."""
        calls, outer = Subgraph.of(call.given.numbers(), self._calls)
        used = outer.union(*(each.new for each in calls))
        writing = [each for each in self._calls if not used.isdisjoint(each.writes)]
        draws = any(each.draws for each in (*calls, *writing))
        if not draws or any(each.module for each in calls) or not outer <= self._known.keys():
            return False
        if writing:
            return True
        with draws_undone(), torch.no_grad():
            return not all(gives_the_same([*calls, call], self._known) for _ in range(_DRAWS))


def _followed_by_calls(calls: Sequence[Call], output: set[int]) -> set[Call]:
    """Return the calls before the last one that acts or makes what the forward returns."""
    needed = [index for index, call in enumerate(calls) if call.acts or not output.isdisjoint(call.made)]
    return set(calls[: needed[-1]]) if needed else set()


def _refused(call: Call, within: str, what: str) -> SkeletonError:
    error = SkeletonError(
        f"{call.name.strip('_')}() at {call.line} reads a value {what}: a replay would go on with that of the forward "
        f"that was recorded. Compute with tensors. For a log, return them or their item() as it is, behind all other "
        f"calls. {_MOVE}"
    )
    error.culprit = within
    return error
