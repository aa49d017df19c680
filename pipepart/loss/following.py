"""Calls the loss on each micro-batch of a step with a tape of its calls, and analyses each different tape once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.own_copy import leaves_of, tensors
from ..capture import Unfinished, loss_of
from ..data.split import MicroBatches
from .analysis import Analysis, Batch, Given, Pattern
from .buffers import buffers_elsewhere, call_with_buffers
from .reduction import StepLoss
from .rules import Rows
from .sized import SizedTape, without_data
from .straight_line import code_of_straight_line
from .sums import Values
from .tape import Lost, Results, Tape
from .torch_losses import is_torch_loss, is_unchanged

_MOST = 64  # mini-batches and kinds of arguments whose patterns are kept


class Followed(NamedTuple):
    """One call of a loss, whose calls of torch are on a tape.

    Attributes:
        tape: of the call.
        places: of the tensors of the batch, which are the first of the tape: in the target, or None for the output.
        batch: the micro-batch.
        border: what the last layer ends with, if the model computes its loss.
        call_sized: calls the loss for the mini-batch, on a tape.
        kinds: of the arguments, if the calls of the loss depend on nothing else.
    """

    tape: Tape
    places: Sequence[int | None]
    batch: Batch
    border: str
    call_sized: Callable[[SizedTape], None]
    kinds: Hashable = None

    def given(self) -> dict[int, Given]:
        """Return what the tensors of the batch are, by their numbers on the tape."""
        return {
            number: Given(
                _state(self.tape.value(number), self.batch, self.border if place is None else ""), place
            )
            for number, place in enumerate(self.places)
        }

    def sized(self) -> SizedTape:
        """Return the tape of the loss for the mini-batch."""
        wholes = [self._whole(number, entry.state) for number, entry in self.given().items()]
        sized = SizedTape(self.tape, wholes)
        self.call_sized(sized)
        return sized

    def _whole(self, number: int, state: Rows | Lost) -> Tensor:
        """Return a tensor of the mini-batch without data."""
        tensor = self.tape.value(number)
        shape = list(tensor.shape)
        if isinstance(state, Rows):
            shape[state.dim] = shape[state.dim] * sum(self.batch.sizes) // self.batch.own
        return without_data(tensor, shape)


def _state(leaf: Tensor, batch: Batch, border: str) -> Rows | Lost:
    """Return where a tensor of the batch holds samples."""
    if not leaf.dim():
        where = f", as {border} belongs to the last layer with all before it" if border else ""
        return Lost(
            f"it uses a scalar that the model returned, and what that is a mean of is not known{where}"
        )
    if leaf.shape[0] % batch.own == 0:
        return Rows(0, batch.regular)
    if leaf.dim() > 1 and leaf.shape[1] == batch.own:  # steps first, samples second
        return Rows(1, batch.regular)
    shape = list(leaf.shape)
    return Lost(f"it is given shape {shape}, whose first dimension is not that of {batch.own} samples")


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


class Following:
    """Calls the loss of one step.

    The pattern of a tape depends on nothing but its calls, their arguments, and the kinds of the tensors of the batch.
    It is therefore found again by these, in the step and in the one after it.

    Args:
        loss: of the steps.
        batch: the mini-batch.
        targets: the leaves of each micro-batch's target.
    """

    def __init__(self, loss: StepLoss, batch: MicroBatches, targets: Sequence[Sequence[Any]]) -> None:
        self._loss, self._function = loss, loss.function
        self._regular = batch.by_samples and batch.regular
        self._sizes = tuple(batch.sizes)
        self._follows = len(batch.sizes) > 1 and batch.by_samples and not _is_compiled(loss.function)
        self._patterns: dict[Hashable, Pattern | str] = {}
        self._earlier: dict[Hashable, Pattern | str] = loss.patterns
        loss.patterns = self._patterns
        self._sized: dict[Hashable, SizedTape] = {}  # by the keys of tapes
        self._has_buffers = isinstance(loss.function, nn.Module) and any(
            True for _ in loss.function.buffers()
        )
        self._is_torchs = is_unchanged(loss.function)
        code = () if self._is_torchs else code_of_straight_line(loss.function)
        self._is_straight = bool(code)
        # By the kinds of the arguments, of a loss that makes the same calls for all of the same kinds: the pattern, and
        # the number of what it returns if the pattern needs that, the arguments and no other tensors, else None. A
        # module may have other settings at the next step.
        self._certain: dict[Hashable, tuple[Pattern, int | None]] = {}
        if isinstance(loss.function, FunctionType):
            self._certain = loss.certain.setdefault((code, self._sizes, self._regular, self._follows), {})
            if len(loss.certain) > _MOST or len(self._certain) > _MOST:
                loss.certain.clear()
        first, *others = targets
        self._common = {  # targets that all micro-batches have in common, by place
            place: leaf
            for place, leaf in enumerate(first)
            if all(len(other) == len(first) and other[place] is leaf for other in others)
        }

    def known(self, micro_batch: int, output: Any, target: Any) -> tuple[Any, Pattern, Values] | None:
        """Call the loss on a micro-batch without a tape; None if its calls are not certain.

        A loss of torch, and a function without branches that reads nothing but its arguments, make the same calls for
        each micro-batch whose tensors are of the same kinds.

        Returns:
            What the loss returns, its pattern, and the tensors of its calls by their numbers.
        """
        if not self._certain or self._function is None:
            return None
        certain = self._certain.get(self._kinds(micro_batch, output, target))
        if certain is None:
            return None
        pattern, number = certain
        if number is None:
            with Results(output, target) as results:
                value = self._function(output, target)
            return value, pattern, results.values.__getitem__
        if self._has_buffers:
            moved = buffers_elsewhere(self._function, output)
            value = call_with_buffers(self._function, (output, target), moved)
        else:
            value = self._function(output, target)
        return value, pattern, {0: output, 1: target, number: value}.__getitem__

    def _kinds(self, micro_batch: int, output: Any, target: Any) -> Hashable:
        if not (self._is_torchs or self._is_straight) or not type(output) is type(target) is Tensor:
            return None
        return self._sizes[micro_batch], _kind(output), _kind(target), torch.is_grad_enabled()

    def call(self, micro_batch: int, output: Any, target: Any) -> tuple[Any, Followed | None]:
        """Call the loss on a micro-batch.

        Returns:
            What it returns, and its calls; None for one micro-batch alone, for a mini-batch that is not split along its
            samples, and for a compiled loss.
        """
        function = self._function
        if function is None:
            return output, None
        values = (output,) if target is None else (output, target)
        moved = buffers_elsewhere(function, output)
        if not self._follows:
            return call_with_buffers(function, values, moved), None
        leaves = leaves_of(target)
        originals = {id(leaves[place]): leaf for place, leaf in self._common.items()}
        # Calls with copies of the loss's buffers are not shared: these are on the streams of one worker.
        earlier = [] if moved else self._loss.calls
        tape = Tape(originals | {id(copy): original for original, copy in moved.values()}, earlier)
        places = self._give(tape, output, leaves)
        with tape:
            value = call_with_buffers(function, values, moved)
        if not moved:
            self._loss.calls = tape.calls
        batch = Batch(self._sizes, self._sizes[micro_batch], self._regular)

        sized_function, border = function, ""
        if isinstance(output, Unfinished):
            recording, total = output.recording, sum(batch.sizes)
            border = recording.border
            tape.reads_sizes |= recording.ends.get(total, recording.end) is not recording.end
            sized_function = partial(loss_of, samples=total)

        def call_sized(sized: SizedTape) -> None:
            sized.call(sized_function, values, moved)

        kinds = None if moved or len(places) != 2 else self._kinds(micro_batch, output, target)
        return value, Followed(tape, places, batch, border, call_sized, kinds)

    def pattern(self, followed: Followed, loss: Tensor) -> Pattern | str:
        """Return the terms of a loss, or the reason why there are none."""
        number = followed.tape.number_of(loss)
        if not isinstance(number, int):
            return number.reason if number is not None else "what it returns does not come from the output"
        return self._analysed(followed, number, Analysis.pattern)

    def count(self, followed: Followed, count: Tensor | float) -> Pattern | None:
        """Return a pattern that is divided by a count; None for a count that cannot be followed."""
        number = followed.tape.number_of(count) if isinstance(count, Tensor) else None
        pattern = self._analysed(followed, number, Analysis.count) if isinstance(number, int) else None
        return pattern if isinstance(pattern, Pattern) else None

    def _analysed(
        self, followed: Followed, number: int, analyse: Callable[[Analysis, int], Pattern | str]
    ) -> Pattern | str:
        """Return a pattern of this step or of the step before, or a new one."""
        tape, places, batch, *_ = followed
        kinds = tuple([(_kind(tape.value(of_batch)), place) for of_batch, place in enumerate(places)])
        calls = batch, kinds, tape.key()
        if tape.reads_sizes and calls not in self._sized:
            self._sized[calls] = followed.sized()
        sized = self._sized.get(calls)
        key = analyse, number, calls, sized and (sized.result, sized.key())
        if key not in self._patterns:
            pattern = self._earlier.get(key)
            if not isinstance(pattern, Pattern) or not pattern.lasting:
                pattern = analyse(Analysis(tape, followed.given(), batch, sized), number)
            self._patterns[key] = pattern
        pattern = self._patterns[key]
        # Another function may have been put in the place of torch's.
        of_torch = self._is_torchs and len(tape.calls) == 1 and is_torch_loss(tape.calls[0].function)
        is_certain = of_torch or (self._is_straight and not any(call.in_place for call in tape.calls))
        if is_certain and followed.kinds is not None and isinstance(pattern, Pattern):
            is_direct = analyse is Analysis.pattern and (self._is_torchs or pattern.needs <= {0, 1, number})
            self._certain[followed.kinds] = pattern, number if is_direct else None
        return pattern

    def _give(self, tape: Tape, output: Any, target: Sequence[Any]) -> list[int | None]:
        """Number the tensors of a micro-batch's output and target; return their places in the target."""
        places: list[int | None] = []
        for leaf in tensors(output):
            tape.give(leaf)
            places.append(None)
        for place, leaf in enumerate(target):
            if isinstance(leaf, Tensor) and leaf.dim() and place not in self._common:
                tape.give(leaf)
                places.append(place)
        return places


def _is_compiled(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule) or hasattr(
        function, "_torchdynamo_orig_callable"
    )
