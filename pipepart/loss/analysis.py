"""Finds the means and sums over samples that the loss of a micro-batch consists of, from the tape of its calls.

A tensor of the batch holds samples (:class:`~.rules.Rows`), or is a sum of terms, each a mean or a sum over samples
(:class:`~.sums.Sum`). Calls without a rule in :mod:`~.rules` make their results untracked (:class:`~.tape.Lost`), with
a reason for the error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.own_copy import tensors
from ..capture.recorded.recording.tables import SIZES, words
from .rules import ALIKE, RULES, SIZES_READ, TAKES_SIZES, LostError, Operation, Positions, Rows, elementwise
from .sized import SizedTape
from .sums import Divisor, Part, Sum, Values, combined
from .tape import PLAIN, Call, Lost, Ref, Tape
from .terms import MicroBatchLoss, Replay, Term, on_host
from .torch_losses import is_torch_loss, result_of

_NONE_KNOWN: Mapping[int, float | Tensor] = {}
_READS = words(
    "item tolist numpy __float__ __int__ __bool__ __index__ __repr__ __format__ __array__ equal allclose"
)

State = Rows | Sum | Divisor | Lost | Positions | None  # None for a constant, the same for all micro-batches


class Given(NamedTuple):
    """A tensor of the batch: what it is, and its place in the target; None for the output."""

    state: Rows | Lost
    place: int | None = None


class Batch(NamedTuple):
    """The micro-batch of a tape.

    Attributes:
        sizes: samples of each micro-batch.
        own: samples of this one.
        regular: whether micro-batches differ in nothing but the number of samples.
    """

    sizes: tuple[int, ...]
    own: int
    regular: bool


class Pattern(NamedTuple):
    """The terms of a loss, for all micro-batches of the same shapes whose calls are the same.

    Attributes:
        key: equal for micro-batches whose losses are computed alike, whatever their numbers of samples.
        parts, shift: as of :class:`~.sums.Sum`.
        replays: for each part what computes the counts of all micro-batches, if their targets alone determine them.
        held: what keys name by its identity, which holds as long as it lives.
        lasting: whether the pattern holds for other steps as well: it has no factor that is a tensor.
        is_mean: whether its only part is the value of the loss itself, a mean.
    """

    key: Hashable
    parts: tuple[Part, ...]
    shift: float
    replays: tuple[Replay | None, ...]
    held: Any
    lasting: bool
    is_mean: bool

    def loss(
        self, value: Tensor, values: Values, counts: Mapping[int, float | Tensor] = _NONE_KNOWN
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch.

        Args:
            value: what the loss function has returned.
            found: gives the tensors of its calls by their numbers.
            counts: by term, where they are known.
        """
        terms = tuple([_term(part, values, counts.get(index)) for index, part in enumerate(self.parts)])
        return MicroBatchLoss(value, terms, self.shift, self.key, self.replays)

    @property
    def needs(self) -> set[int | None]:
        """The numbers of the tensors that the terms are computed from; None stands for those of a sum, not known."""
        divisors = [part.divisor for part in self.parts if part.divisor is not None]
        of_sums = [None for part in self.parts if part.summed is not None]
        operands = [number for divisor in divisors for number in divisor.operands]
        return {*operands, *of_sums, *(part.number for part in self.parts)}

    def writes_counts(self, tape: Tape) -> bool:
        """Return True if the loss has written into a tensor by which it counts."""
        divisors = [part.divisor for part in self.parts if part.divisor is not None]
        return any(tape.is_written(Ref(number)) for divisor in divisors for number in divisor.operands)


def _term(part: Part, values: Values, known: float | Tensor | None) -> Term:
    tensor, divisor, divided = values(part.number), part.divisor, part.divided
    if not part.gradient:  # the loss may have detached a term that has one
        tensor = tensor.detach()
    if divisor is None:
        return Term(tensor, part.coefficient)
    # A count on an accelerator may have been computed on the stream of another worker.
    count = known if isinstance(known, float) else divisor.part(values)
    if part.summed is not None and (isinstance(count, Tensor) or not count):
        tensor, divided = part.summed(values), False
        tensor = tensor if part.gradient else tensor.detach()
    return Term(tensor, part.coefficient, count, divided, divisor.least)


class Analysis:
    """What is known of the tensors of a tape.

    Args:
        tape: of a micro-batch.
        given: the tensors of the batch, by number.
        batch: the micro-batch.
        sized: the tape of the mini-batch, if the loss reads sizes; None if it does not, or cannot be called for it.
    """

    def __init__(
        self, tape: Tape, states: Mapping[int, Given], batch: Batch, sized: SizedTape | None = None
    ) -> None:
        self._tape, self._given, self._batch, self._sized = tape, states, batch, sized
        self._states: dict[int, State] = {number: entry.state for number, entry in states.items()}
        self._read = ""
        self._of_sizes: set[int] = set()  # numbers of tensors that were made from the number of samples
        for place, call in enumerate(tape.calls):
            self._follow(place, call)

    def pattern(self, number: int) -> Pattern | str:
        """Return the terms of the loss with a number, or the reason why there are none."""
        state, tape = self._states.get(number), self._tape
        if isinstance(state, Lost):
            return state.reason
        if self._sized is not None and self._sized.result != number:
            return f"it reads the number of samples, and takes another way for that of the mini-batch: {SIZES_READ}"
        if not isinstance(state, Sum) or not state.parts:
            return (
                "what it returns is no sum of means and sums, or was computed where torch cannot be followed"
            )
        parts, shift = state
        gradient, first = tape.value(number).requires_grad, parts[0]
        if all(part.divisor is not None and not part.divisor.operands for part in parts):
            # The loss is a mean over samples, and so is its gradient.
            samples = float(self._batch.own)
            parts, shift = (Part(number, gradient, divisor=Divisor(lambda _: samples), divided=True),), 0.0
        elif len(parts) == 1 and not shift:
            exact = first.divided and (first.summed is None or first.coefficient == 1.0)
            if first.divisor is None or exact:
                parts = (first._replace(number=number, gradient=gradient, coefficient=1.0),)
        return self._kept(number, parts, shift)

    def count(self, number: int) -> Pattern:
        """Return a pattern whose only part is divided by the count with a number.

        Its replay computes the count of another micro-batch, if the target alone determines it.
        """
        state = self._states.get(number)
        divisor = (
            state
            if isinstance(state, Divisor)
            else Divisor(lambda sum_of_count: on_host(sum_of_count(number).detach()), (number,))
        )
        sum_of_count = self._kept(number, (Part(number, False, divisor=divisor),), 0.0)
        return sum_of_count._replace(replays=(None,)) if isinstance(state, Lost) else sum_of_count

    def _kept(self, number: int, parts: tuple[Part, ...], shift: float) -> Pattern:
        calls = (
            self._tape.calls if self._sized is None else self._sized.calls
        )  # their sizes are the same for all
        key = (number, *[calls[place].key for place in self._tape.needed(number)])
        replays = tuple([self._replay(part.divisor) for part in parts])
        held = tuple(self._tape.calls), self._tape.originals
        lasting = not any(isinstance(part.coefficient, Tensor) for part in parts)
        first = parts[0]
        is_mean = len(parts) == 1 and first.number == number and first.gradient and first.divided
        return Pattern(key, parts, shift, replays, held, lasting, is_mean and first.summed is None)

    def _replay(self, divisor: Divisor | None) -> Replay | None:
        """Return what computes the counts of all micro-batches from their targets."""
        if divisor is None:
            return None
        count, operands = divisor.part, divisor.operands
        sizes, own = self._batch.sizes, self._batch.own
        if not operands:
            return lambda _: [count(_no_value) * size / own for size in sizes]
        calls = [self._tape.calls[place] for place in self._tape.needed(*operands)]
        leaves = [leaf.number for call in calls for leaf in call.leaves if isinstance(leaf, Ref)]
        numbers = {number for call in calls for number in call.numbers}
        places = {
            number: self._given[number].place for number in (*leaves, *operands) if number not in numbers
        }
        writes = any(call.in_place for call in calls)
        if None in places.values() or writes or not numbers.isdisjoint(self._of_sizes):
            return None

        def values_of(leaves: Sequence[Any]) -> dict[int, Any]:
            values = {number: leaves[place] for number, place in places.items() if place is not None}
            for call in calls:
                filled = [values[leaf.number] if isinstance(leaf, Ref) else leaf for leaf in call.leaves]
                args, kwargs = call.filled(filled)
                values.update(zip(call.numbers, tensors(call.function(*args, **kwargs)), strict=True))
            return values

        if (of_all := divisor.of_all) is None:
            return lambda targets: [count(values_of(leaves).__getitem__) for leaves in targets]
        (operand,) = operands
        return lambda targets: of_all([values_of(leaves)[operand] for leaves in targets])

    def _follow(self, place: int, call: Call) -> None:
        """Note what the tensors are that a call has made or written."""
        states = [self._states[leaf.number] if isinstance(leaf, Ref) else None for leaf in call.leaves]
        lost = [each.reason for each in (*call.leaves, *states) if isinstance(each, Lost)]
        tracked = any(state is not None for state in states)
        if call.name in SIZES:
            if lost:
                self._note_read(call, "a size", lost[0])
            elif tracked and self._sized is None:
                self._note_read(call, "the number of samples", SIZES_READ)
            return
        outcome: State | Sequence[State]
        try:
            outcome = Lost(lost[0]) if lost else self._state(place, call, states)
        except LostError as error:
            outcome = Lost(f"{call.name.strip('_')} at {call.line} {error}")
        if tracked and (not call.numbers or (call.in_place and isinstance(outcome, Lost))):
            self._note_read(call, "a value", "read values last, and divide by a count as a tensor")
        if tracked and not call.numbers and call.name not in _READS:  # it may have changed what it was given
            changed = Lost(f"it changes a tensor with {call.name} at {call.line}")
            self._states.update({leaf.number: changed for leaf in call.leaves if isinstance(leaf, Ref)})
        several = outcome if isinstance(outcome, list) else [outcome] * len(call.numbers)
        self._states.update(zip(call.numbers, several, strict=True))

    def _note_read(self, call: Call, what: str, help: str) -> None:
        """Note that the loss has read a number that may enter all that it computes later."""
        place = f"{call.name.strip('_')} at {call.line}"
        self._read = self._read or f"it reads {what}, {place}, before it is finished: {help}"

    def _state(self, place: int, call: Call, states: list[Any]) -> State | list[Any]:
        """Return what the results of a call are.

        Raises:
            LostError: that is not known.
        """
        if not call.numbers:
            return None
        if call.arguments[1].get("out") is not None:
            raise LostError("writes into out=")
        tracked = any(state is not None for state in states)
        scaled = self._in_proportion(place) if self._sized is not None else []
        if scaled:
            self._of_sizes.update(call.numbers)
        if tracked and self._read:
            return Lost(self._read)
        values = [self._tape.value(leaf.number) if isinstance(leaf, Ref) else leaf for leaf in call.leaves]
        results = [self._tape.value(number) for number in call.numbers]
        constants = [
            leaf
            for index, (leaf, state) in enumerate(zip(call.leaves, states, strict=True))
            if state is None and isinstance(leaf, Ref | Tensor) and (index or not call.in_place)
        ]
        is_written = any(map(self._tape.is_written, constants))
        operation = Operation(call, values, results, states, scaled, self._batch.own, is_written)
        if not tracked:
            return _of_constants(operation)
        has_positions = any(isinstance(state, Positions) for state in states)
        if has_positions and (call.name != "__getitem__" or not isinstance(states[0], Rows)):
            raise LostError("takes the indices of samples for more than to pick values of each sample")
        sums = any(isinstance(state, Sum | Divisor) for state in states)
        if is_torch_loss(call.function):
            if sums:
                raise LostError("takes a sum over samples, which differs from that of the mini-batch")
            return result_of(operation)
        if sums:
            return combined(operation)
        if call.name in ("sum", "mean") and not results[0].dim():
            return self._reduced(operation)
        return _of_samples(operation)

    def _in_proportion(self, place: int) -> list[int]:
        """Return the places of arguments that are numbers in proportion to the samples.

        Raises:
            LostError: arguments differ in another way, so that the call is another one for the mini-batch.
        """
        assert self._sized is not None
        own, all_samples = self._batch.own, sum(self._batch.sizes)
        call = self._tape.calls[place]
        other = self._sized.calls[place] if place < len(self._sized.calls) else None
        if other is None or other.form != call.form or len(other.leaves) != len(call.leaves):
            raise LostError(f"depends on the number of samples: {SIZES_READ}")
        scaled = []
        for index, (part, whole) in enumerate(zip(call.leaves, other.leaves, strict=True)):
            if isinstance(part, Tensor) or type(part) is not type(whole):
                same = part is whole
            elif part != whole and isinstance(part, int | float):
                same = self._batch.regular and part * all_samples == whole * own
                scaled.append(index)
            else:  # tensors without data have a device of their own
                same = part == whole or isinstance(part, torch.device)
            if not same:
                raise LostError(f"depends on the number of samples: {SIZES_READ}")
        return scaled

    def _reduced(self, operation: Operation) -> Sum:
        """Return the mean or the sum of all elements."""
        tensor, rows = operation.single()
        call, gradient = operation.call, operation.results[0].requires_grad
        if call.name == "sum":
            return Sum((Part(call.numbers[0], gradient),))
        of = next(leaf.number for leaf in call.leaves if isinstance(leaf, Ref))
        size = float(tensor.numel())
        count = (
            Divisor(lambda _: size)
            if rows.regular
            else Divisor(lambda values: float(values(of).numel()), (of,))
        )
        return Sum((Part(call.numbers[0], gradient, divisor=count, divided=True),))


def _of_constants(operation: Operation) -> Positions | None:
    """Return what a call makes of constants: another constant, or the indices of the samples."""
    call = operation.call
    if operation.scaled:
        if call.name == "arange" and len(call.arguments[0]) == 1:
            return Positions()
        raise LostError(f"takes the number of samples: {SIZES_READ}")
    _check_plain(call)
    if call.name not in ALIKE:
        raise LostError("is not known to give the same for every micro-batch")
    return None


def _of_samples(operation: Operation) -> Any:
    """Return the states of results that are neither means nor sums over samples."""
    call, name = operation.call, operation.call.name
    if operation.scaled and name not in TAKES_SIZES:
        raise LostError(f"takes the number of samples: {SIZES_READ}")
    if name in ("new_zeros", "new_ones", "new_full", "to", "type_as") and (
        name.startswith("new_") or operation.states[0] is None
    ):
        return None
    rule = RULES.get(name)
    if rule is None:
        raise LostError("is not known to keep samples apart")
    if call.in_place and rule is not elementwise:
        raise LostError("writes in place: use a function that returns a new tensor")
    _check_plain(call)
    return rule(operation)


def _check_plain(call: Call) -> None:
    for leaf in call.leaves:
        if not isinstance(leaf, Tensor | Ref | int | float) and type(leaf) not in PLAIN:
            raise LostError(
                f"is given a {type(leaf).__name__}, which may change without a sign: make it a tensor once"
            )


def _no_value(number: int) -> Tensor:
    raise AssertionError(f"the count is a number, and tensor {number} was asked for")
