"""Finds the means and sums over samples that the loss of a micro-batch consists of, from the tape of its calls.

A tensor of the batch holds samples (:class:`~.rules.Rows`), or is a sum of terms, each a mean or a sum over samples
(:class:`~.sums.Sum`). Calls without a rule in :mod:`~.rules` make their results untracked (:class:`~.tape.Lost`), with
a reason for the error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture.recorded.recording.tables import SIZES, words
from .rules import ALIKE, FILLS, RULES, TAKES_SIZES, LostError, Operation, Positions, Rows
from .sums import Divisor, Part, Sum, combined
from .tape import Call, Lost, Ref, Tape
from .terms import Count, Replay, Term, Terms
from .torch_losses import is_torch_loss, result_of
from .whole import ELEMENTWISE

_READS = words(
    "item tolist numpy __float__ __int__ __bool__ __index__ __repr__ __format__ __array__ equal allclose"
)
_READ_LAST = "read values last, and divide by a count as a tensor"
_SIZES_READ = "write flatten(1) for reshape(len(x), -1), and divide a sum over samples by it alone"

State = Rows | Sum | Lost | Positions | None  # None for a constant, the same for all micro-batches


class Given(NamedTuple):
    """A tensor of the batch: what it is, and its place in the target; None for the output."""

    state: Rows | Lost
    place: int | None = None


class Batch(NamedTuple):
    """The micro-batch of a tape.

    Attributes:
        sizes: samples of each micro-batch.
        number: of this one.
        regular: whether micro-batches differ in nothing but the number of samples.
        call_whole: calls the loss on the tensors of the mini-batch; None if its numbers do not follow the shapes.
    """

    sizes: Sequence[int]
    number: int
    regular: bool
    call_whole: Callable[[Mapping[int, Tensor]], tuple[Tape, int | None]] | None

    def whole_extent(self, extent: int) -> int:
        """Return the extent of the mini-batch for one of this micro-batch."""
        return extent * sum(self.sizes) // self.sizes[self.number]


class Pattern(NamedTuple):
    """The terms of a loss, for all micro-batches of the same shapes whose calls are the same.

    Attributes:
        key: equal for micro-batches whose losses are computed alike, whatever their numbers of samples.
        parts, shift: as of :class:`~.sums.Sum`.
        replays: for each part what computes its count for another micro-batch, if the target alone determines it.
    """

    key: Hashable
    parts: tuple[Part, ...]
    shift: float | Tensor
    replays: tuple[Replay | None, ...]

    def terms(self, tape: Tape) -> Terms:
        """Return the terms of a micro-batch.

        Raises:
            LostError: the loss has written into what it counts.
        """
        return Terms(tuple(map(_term, self.parts, self.replays, [tape] * len(self.parts))), self.shift)


def _term(part: Part, replay: Replay | None, tape: Tape) -> Term:
    tensor, divisor = tape.value(part.number), part.divisor
    if divisor is None:
        return Term(tensor, part.coefficient)
    if any(tape.is_written(Ref(number)) for number in divisor.operands):
        raise LostError("it writes into a tensor by which it counts")
    value = divisor.part(tape.value)
    count = Count(value, replay, not divisor.operands, divisor.least)
    if part.summed is not None and (isinstance(value, Tensor) or not value):
        return Term(part.summed(tape.value), part.coefficient, count)
    return Term(tensor, part.coefficient, count, part.divided)


class Analysis:
    """What is known of the tensors of a tape.

    Args:
        tape: of a micro-batch.
        given: the tensors of the batch, by number.
        batch: the micro-batch.
    """

    def __init__(self, tape: Tape, given: Mapping[int, Given], batch: Batch) -> None:
        self._tape, self._given, self._batch = tape, given, batch
        self._states: dict[int, State] = {number: one.state for number, one in given.items()}
        self._wholes = {number: self._whole(number, one.state) for number, one in given.items()}
        self._whole_tape: Tape | None = None
        self._whole_result: int | None = None
        self._read = ""
        self._sized: set[int] = set()  # numbers of tensors that were made from the number of samples
        for place, call in enumerate(tape.calls):
            self._follow(place, call)

    def pattern(self, number: int) -> Pattern | str:
        """Return the terms of the loss with a number, or the reason why there are none."""
        state, tape = self._states.get(number), self._tape
        if isinstance(state, Lost):
            return state.reason
        if self._whole_tape is not None and self._whole_result != number:
            return f"it reads the number of samples, and takes another way for that of the mini-batch: {_SIZES_READ}"
        if not isinstance(state, Sum) or not state.parts:
            return (
                "what it returns is no sum of means and sums, or was computed where torch cannot be followed"
            )
        parts, shift = state
        in_proportion = [part.divisor is not None and not part.divisor.operands for part in parts]
        gradient = tape.value(number).requires_grad
        if all(in_proportion):  # the loss is a mean over samples, and so is its gradient
            own = float(self._batch.sizes[self._batch.number])
            parts, shift = (Part(number, gradient, divisor=Divisor(lambda _: own), divided=True),), 0.0
        elif (
            len(parts) == 1
            and type(shift) is float
            and not shift
            and not isinstance(parts[0].coefficient, Tensor)
        ):
            exact = parts[0].summed is None or parts[0].coefficient == 1.0
            if parts[0].divisor is None or (parts[0].divided and exact):
                parts = (parts[0]._replace(number=number, gradient=gradient, coefficient=1.0),)
        key = (self._whole_tape or tape).key(number)
        return Pattern(key, parts, shift, tuple([self._replay(part.divisor) for part in parts]))

    def count(self, number: int) -> Replay | None:
        """Return what computes a count for another micro-batch, if the target alone determines it."""
        if isinstance(self._states.get(number), Lost):
            return None
        return self._replay(Divisor(lambda found: found(number), (number,)))

    def _replay(self, divisor: Divisor | None) -> Replay | None:
        """Return what computes the count of another micro-batch from its target."""
        if divisor is None:
            return None
        count, operands = divisor.part, divisor.operands
        sizes, index = self._batch.sizes, self._batch.number
        if not operands:
            return lambda _, other: count(_no_value) * sizes[other] / sizes[index]
        calls = {id(call): call for operand in operands for call in self._tape.needed(operand)}
        leaves = [leaf.number for call in calls.values() for leaf in call.leaves if isinstance(leaf, Ref)]
        made = {number for call in calls.values() for number in call.numbers}
        places = {number: self._given[number].place for number in (*leaves, *operands) if number not in made}
        writes = any(call.in_place or call.name == "__setitem__" for call in calls.values())
        if None in places.values() or writes or not made.isdisjoint(self._sized):
            return None
        order = [call for call in self._tape.calls if id(call) in calls]

        def replayed(targets: Sequence[Sequence[Any]], other: int) -> Any:
            values = {number: targets[other][place] for number, place in places.items() if place is not None}
            for call in order:
                args, kwargs = call.filled(
                    lambda leaf: values[leaf.number] if isinstance(leaf, Ref) else leaf
                )
                result = call.function(*args, **kwargs)
                values.update(
                    zip(call.numbers, [result] if isinstance(result, Tensor) else result, strict=True)
                )
            return count(values.__getitem__)

        return replayed

    def _whole(self, number: int, state: State) -> Tensor:
        """Return a tensor of the mini-batch without data."""
        tensor = self._tape.value(number)
        shape = list(tensor.shape)
        if isinstance(state, Rows):
            shape[state.dim] = self._batch.whole_extent(shape[state.dim])
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    def _follow(self, place: int, call: Call) -> None:
        """Note what the tensors are that a call has made or written."""
        states = [self._states[leaf.number] if isinstance(leaf, Ref) else None for leaf in call.leaves]
        if call.name in SIZES:
            self._read_size(call, states[0])
            return
        tracked = any(state is not None for state in states)
        found: State | list[State]
        try:
            found = self._found(place, call, states)
        except LostError as error:
            found = Lost(f"{call.name.strip('_')} at {call.line} {error}")
        if tracked and (not call.numbers or (call.in_place and isinstance(found, Lost))):
            self._read = (
                self._read
                or f"it reads a value, {call.name.strip('_')} at {call.line}, before it is "
                + (f"finished: {_READ_LAST}")
            )
        if tracked and not call.numbers and call.name not in _READS:  # it may have changed what it was given
            changed = Lost(f"it changes a tensor with {call.name} at {call.line}")
            self._states.update({leaf.number: changed for leaf in call.leaves if isinstance(leaf, Ref)})
        several = found if isinstance(found, list) else [found] * len(call.numbers)
        self._states.update(zip(call.numbers, several, strict=True))

    def _found(self, place: int, call: Call, states: list[Any]) -> State | list[Any]:
        """Return what the results of a call are, and note them for the mini-batch.

        Raises:
            LostError: that is not known.
        """
        reasons = [leaf.reason for leaf in (*call.leaves, *states) if isinstance(leaf, Lost)]
        if reasons:
            return Lost(reasons[0])
        if not call.numbers:
            return None
        if call.kwargs.get("out") is not None:
            raise LostError("writes into out=")
        operation = self._operation(place, call, states)
        tracked = any(state is not None for state in states)
        if tracked and self._read:
            return Lost(self._read)
        sums = any(isinstance(state, Sum) for state in states)
        if tracked and is_torch_loss(call.function):
            if sums:
                raise LostError("takes a sum over samples, which differs from that of the mini-batch")
            found = result_of(operation, self._batch.sizes[self._batch.number])
        elif sums:
            found = combined(operation)
        elif tracked and call.name in ("sum", "mean") and not operation.results[0].dim():
            found = self._reduced(operation)
        else:
            found = self._kept(operation, tracked)
        if not isinstance(found, Sum):
            made = operation.wholes if tracked or operation.scaled else operation.results
            self._wholes.update(zip(call.numbers, made, strict=True))
        return found

    def _operation(self, place: int, call: Call, states: list[Any]) -> Operation:
        """Return a call with its arguments, as tensors and for the mini-batch."""
        numbers, scaled = self._numbers(place, call)
        if scaled:
            self._sized.update(call.numbers)
        values = [self._tape.value(leaf.number) if isinstance(leaf, Ref) else leaf for leaf in call.leaves]
        constants = [leaf for leaf, state in zip(call.leaves, states, strict=True) if state is None]
        if call.before is not None:
            values[0] = call.before
            constants = [leaf for leaf in constants if leaf is not call.leaves[0]]
        results = [self._tape.value(number) for number in call.numbers]
        is_written = any(map(self._tape.is_written, constants))
        return Operation(call, states, values, results, self._wholes, numbers, scaled, is_written)

    def _kept(self, operation: Operation, tracked: bool) -> State | list[Any]:
        """Return the state of a result that is neither a mean nor a sum over samples."""
        call, name = operation.call, operation.name
        if any(isinstance(state, Positions) for state in operation.states) and name != "__getitem__":
            raise LostError(
                "takes the numbers of samples for anything else than to pick values of each sample"
            )
        if operation.scaled and name not in TAKES_SIZES:
            raise LostError(f"takes the number of samples: {_SIZES_READ}")
        is_fill = name in FILLS and (not tracked or name.startswith("new_"))
        if is_fill or (tracked and name in ("to", "type_as") and operation.states[0] is None):
            return [Rows(dim, True) for dim in operation.layout()] if operation.scaled else None
        if not tracked:
            if name not in ALIKE:
                raise LostError("is not known to give the same for every micro-batch")
            if operation.scaled and (name != "arange" or len(operation.values) - len(call.kwargs) != 1):
                raise LostError("is not known to give the same for every micro-batch")
            return Positions() if operation.scaled else None
        rule = RULES.get(name)
        if rule is None or (call.in_place and name not in ELEMENTWISE):
            raise LostError("is not known to keep samples apart")
        return rule(operation)

    def _reduced(self, operation: Operation) -> Sum:
        """Return the mean or the sum of all elements."""
        tensor, rows = operation.single()
        number, gradient = operation.call.numbers[0], operation.results[0].requires_grad
        if operation.name == "sum":
            return Sum((Part(number, gradient),))
        of = next(leaf.number for leaf in operation.call.leaves if isinstance(leaf, Ref))
        size = float(tensor.numel())
        count = (
            Divisor(lambda _: size)
            if rows.regular
            else Divisor(lambda found: float(found(of).numel()), (of,))
        )
        return Sum((Part(number, gradient, divisor=count, divided=True),))

    def _read_size(self, call: Call, state: State) -> None:
        """Call the loss with as many samples as the mini-batch has, if it has read their number."""
        if isinstance(state, Positions):
            state = Rows(0, True)
        if isinstance(state, Lost):
            self._read = (
                self._read or f"it reads a size at {call.line}, before it is finished, and {state.reason}"
            )
        if not isinstance(state, Rows):
            return
        dims = self._tape.value(call.leaves[0].number).dim()
        dim = call.argument(1, "dim") if call.name == "size" else 0 if call.name == "__len__" else None
        if call.name in ("shape", "size") and dim is None:
            is_read = state.dim in call.answer.read
        else:
            is_read = dim is None or dim % dims == state.dim
        if not is_read or self._whole_tape is not None:
            return
        if self._batch.call_whole is None or not self._batch.regular:
            self._read = (
                self._read
                or f"it reads the number of samples at {call.line}, before it is finished: " + (_SIZES_READ)
            )
            return
        given = {number: self._wholes[number] for number in self._given}
        self._whole_tape, self._whole_result = self._batch.call_whole(given)

    def _numbers(self, place: int, call: Call) -> tuple[list[Any], list[int]]:
        """Return the arguments of a call for the mini-batch, and where they are in proportion to its samples."""
        if self._whole_tape is None:
            return call.leaves, []
        calls = self._whole_tape.calls
        other = calls[place].leaves if place < len(calls) else []
        if len(other) != len(call.leaves):
            raise LostError(f"depends on the number of samples: {_SIZES_READ}")
        scaled = []
        for index, (part, whole) in enumerate(zip(call.leaves, other, strict=True)):
            if isinstance(part, Ref) and isinstance(whole, Ref):
                same = part.number == whole.number
            elif isinstance(part, int | float) and isinstance(whole, int | float) and part != whole:
                same = part * sum(self._batch.sizes) == whole * self._batch.sizes[self._batch.number]
                scaled.append(index)
            else:
                same = part is whole or (not isinstance(part, Tensor) and part == whole)
            if not same:
                raise LostError(f"depends on the number of samples: {_SIZES_READ}")
        return other, scaled


def _no_value(number: int) -> Tensor:
    raise AssertionError(f"the count is a number, and tensor {number} was asked for")
