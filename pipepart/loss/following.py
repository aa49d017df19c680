"""Calls the loss on each micro-batch of a step with a tape of its calls, and analyses each different tape once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.own_copy import leaves_of, tensors
from ..capture import Unfinished, loss_of
from ..data.split import MicroBatches
from .analysis import Analysis, Batch, Given, Pattern
from .buffers import buffers_elsewhere, call_with_buffers
from .reduction import StepLoss
from .rules import Rows
from .tape import Lost, Tape
from .terms import MicroBatchLoss, Replay
from .torch_losses import is_torch_loss, is_unchanged
from .whole import WholeTape


class Followed(NamedTuple):
    """One call of a loss, whose calls of torch are on a tape.

    Attributes:
        tape: of the call.
        given: the tensors of the batch, by their numbers on the tape.
        batch: the micro-batch.
        call_whole: calls the loss for the mini-batch, on a tape; None if its numbers do not follow the shapes.
        kinds: of the arguments, if the loss does nothing but call a function of torch with them.
    """

    tape: Tape
    given: dict[int, Given]
    batch: Batch
    call_whole: Callable[[WholeTape], None] | None
    kinds: Hashable = None

    def whole_tape(self, result: int) -> WholeTape:
        """Return the tape of the mini-batch: of the loss if it has read sizes, else of its calls alone."""
        whole = WholeTape(self.tape, {number: self._whole(number) for number in self.given})
        if self.is_sized and self.call_whole is not None:
            self.call_whole(whole)
        else:
            whole.repeat(result)
        return whole

    @property
    def is_sized(self) -> bool:
        """Whether the loss itself is called for the mini-batch."""
        return self.tape.reads_sizes and self.call_whole is not None

    def _whole(self, number: int) -> Tensor:
        """Return a tensor of the mini-batch without data."""
        tensor, state = self.tape.value(number), self.given[number].state
        shape = list(tensor.shape)
        if isinstance(state, Rows):
            own, all_samples = self.batch.samples
            shape[state.dim] = shape[state.dim] * all_samples // own
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


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
        self._function = loss.function
        self._regular = batch.by_samples and _is_regular(batch, targets)
        self._sizes = tuple(batch.sizes)
        self._follows = len(batch.sizes) > 1 and batch.by_samples and not _is_compiled(loss.function)
        self._patterns: dict[Hashable, Pattern | str] = {}
        self._earlier: dict[Hashable, Pattern | str] = loss.patterns
        loss.patterns = self._patterns
        self._is_torchs = is_unchanged(loss.function)
        # Patterns of torch's losses, by the kinds of their arguments.
        self._of_torch: dict[Hashable, Pattern] = {}
        first, *others = targets
        self._common = {  # targets that all micro-batches have in common, by place
            place: leaf
            for place, leaf in enumerate(first)
            if all(len(other) == len(first) and other[place] is leaf for other in others)
        }
        self._constants: dict[int, Any] = {}  # of all tapes, which keys name by their identity

    def known(
        self, micro_batch: int, output: Any, target: Any, counts: Mapping[int, float | Tensor]
    ) -> MicroBatchLoss | None:
        """Compute the loss of a micro-batch without a tape; None if that is not possible.

        One of torch's losses makes the same call for each micro-batch whose tensors are of the same kind. ``counts``
        are those of its terms that are known already.
        """
        kinds = self._kinds(micro_batch, output, target)
        pattern = None if kinds is None else self._of_torch.get(kinds)
        if pattern is None or self._function is None:
            return None
        moved = buffers_elsewhere(self._function, output)
        value = call_with_buffers(self._function, (output, target), moved)
        return pattern.loss(value, (output, target, value).__getitem__, counts)

    def _kinds(self, micro_batch: int, output: Any, target: Any) -> Hashable:
        if not self._is_torchs or type(output) is not Tensor or type(target) is not Tensor:
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
        tape = Tape(originals | {id(copy): own for own, copy in moved.values()})
        given = self._give(tape, micro_batch, output, leaves)
        with tape:
            value = call_with_buffers(function, values, moved)
        self._constants.update(tape.constants)
        batch = Batch(self._sizes, self._sizes[micro_batch], self._regular)

        def call_whole(whole: WholeTape) -> None:
            whole.call(function, values, moved)

        kinds = None if moved or len(given) != 2 else self._kinds(micro_batch, output, target)
        return value, Followed(tape, given, batch, None if function is loss_of else call_whole, kinds)

    def pattern(self, followed: Followed, loss: Tensor) -> Pattern | str:
        """Return the terms of a loss, or the reason why there are none."""
        number = followed.tape.number_of(loss)
        if not isinstance(number, int):
            return number.reason if number is not None else "what it returns does not come from the output"
        found = self._analysed(followed, number, Analysis.pattern)
        calls = followed.tape.calls
        # Another function may have been put in the place of torch's.
        is_torchs = len(calls) == 1 and is_torch_loss(calls[0].function)
        if is_torchs and followed.kinds is not None and isinstance(found, Pattern):
            self._of_torch[followed.kinds] = found
        return found

    def count(self, followed: Followed, count: Tensor | float) -> tuple[Replay | None, Hashable]:
        """Return what computes a count for other micro-batches, and a key of how it was computed."""
        number = followed.tape.number_of(count) if isinstance(count, Tensor) else None
        if not isinstance(number, int):
            return None, None
        pattern = self._analysed(followed, number, Analysis.count)
        return (pattern.replays[0], pattern.key) if isinstance(pattern, Pattern) else (None, None)

    def _analysed(
        self, followed: Followed, number: int, analyse: Callable[[Analysis, int], Pattern | str]
    ) -> Pattern | str:
        """Return a pattern of this step, one of the step before that still holds, or a new one."""
        tape, given, batch, *_ = followed
        kinds = tuple([(_kind(tape.value(place)), one.place) for place, one in given.items()])
        key = analyse, number, batch, kinds, tape.key()
        if key in self._patterns:
            return self._patterns[key]
        found = self._earlier.get(key)
        lasts = isinstance(found, Pattern) and found.lasting
        whole = followed.whole_tape(number) if followed.is_sized or not lasts else None
        if not isinstance(found, Pattern) or not lasts or (whole and found.whole_key != whole.key()):
            assert whole is not None
            found = analyse(Analysis(tape, whole, given, batch, followed.is_sized), number)
        self._patterns[key] = found
        return found

    def _give(self, tape: Tape, micro_batch: int, output: Any, target: Sequence[Any]) -> dict[int, Given]:
        """Number the tensors of a micro-batch's output and target."""
        border = output.recording.border if isinstance(output, Unfinished) else ""
        given = {tape.give(leaf): Given(self._state(leaf, micro_batch, border)) for leaf in tensors(output)}
        for place, leaf in enumerate(target):
            if isinstance(leaf, Tensor) and leaf.dim() and place not in self._common:
                given[tape.give(leaf)] = Given(self._state(leaf, micro_batch), place)
        return given

    def _state(self, leaf: Tensor, micro_batch: int, border: str = "") -> Rows | Lost:
        """Return where a tensor holds samples; ``border`` is what the last layer ends with, if the model has a loss."""
        samples = self._sizes[micro_batch]
        if not leaf.dim():
            where = f", as {border} belongs to the last layer with all before it" if border else ""
            return Lost(
                f"it uses a scalar that the model returned, and what that is a mean of is not known{where}"
            )
        if leaf.shape[0] % samples == 0:
            return Rows(0, self._regular)
        if leaf.dim() > 1 and leaf.shape[1] == samples:  # steps first, samples second
            return Rows(1, self._regular)
        shape = list(leaf.shape)
        return Lost(f"it is given shape {shape}, whose first dimension is not that of {samples} samples")


def _is_regular(batch: MicroBatches, targets: Sequence[Sequence[Any]]) -> bool:
    """Return True if the shapes of micro-batches differ in nothing but the number of samples."""
    shapes = [
        [leaf.shape[1:] for leaf in (*leaves_of(one), *target) if isinstance(leaf, Tensor) and leaf.dim()]
        for one, target in zip(batch.inputs, targets, strict=True)
    ]
    return all(other == shapes[0] for other in shapes)


def _is_compiled(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule) or hasattr(
        function, "_torchdynamo_orig_callable"
    )
