"""Calls the loss on each micro-batch of a step with a tape of its calls, and analyses each different tape once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.own_copy import tensors
from ..capture import Unfinished, loss_of
from ..data.split import MicroBatches
from .analysis import Analysis, Batch, Given, Pattern
from .buffers import buffers_elsewhere, call_with_buffers
from .rules import Rows
from .tape import Lost, Tape
from .terms import Replay
from .whole import call_whole


class Followed:
    """One call of a loss, whose calls of torch are on a tape.

    Args:
        tape: of the call.
        analysis: analyses the tape.
        patterns, counts: of earlier calls in the step, by what was computed from which shapes.
    """

    def __init__(
        self,
        tape: Tape,
        analysis: Callable[[], Analysis],
        patterns: dict[Hashable, Pattern | str],
        counts: dict[Hashable, Replay | None],
    ) -> None:
        self.tape = tape
        self._analysis, self._patterns, self._counts = analysis, patterns, counts

    def pattern(self, loss: Tensor) -> Pattern | str:
        """Return the terms of a loss, or the reason why there are none."""
        number = self.tape.number_of(loss)
        if not isinstance(number, int):
            return number.reason if number is not None else "what it returns does not come from the output"
        key = self.tape.key(number), self.tape.shapes
        if key not in self._patterns:
            self._patterns[key] = self._analysis().pattern(number)
        return self._patterns[key]

    def count(self, count: Tensor | float) -> tuple[Replay | None, Hashable]:
        """Return what computes a count for other micro-batches, and a key of how it was computed."""
        number = self.tape.number_of(count) if isinstance(count, Tensor) else None
        if not isinstance(number, int):
            return None, None
        key = self.tape.key(number)
        if (key, self.tape.shapes) not in self._counts:
            self._counts[key, self.tape.shapes] = self._analysis().count(number)
        return self._counts[key, self.tape.shapes], key


class Following:
    """Calls the loss of one step.

    Args:
        function: the loss; None if the model returns it.
        batch: the mini-batch.
        targets: the leaves of each micro-batch's target.
    """

    def __init__(
        self, function: Callable[..., Any] | None, batch: MicroBatches, targets: Sequence[Sequence[Any]]
    ) -> None:
        self._function, self._batch, self._targets = function, batch, targets
        self._regular = batch.by_samples and _is_regular(batch, targets)
        self._patterns: dict[Hashable, Pattern | str] = {}
        self._counts: dict[Hashable, Replay | None] = {}
        first, *others = targets
        self._common = {  # targets that all micro-batches have in common, by place
            place: leaf
            for place, leaf in enumerate(first)
            if all(len(other) == len(first) and other[place] is leaf for other in others)
        }
        self._constants: dict[int, Any] = {}  # of all tapes, which keys name by their identity

    def call(self, micro_batch: int, output: Any, target: Any) -> tuple[Any, Followed | None]:
        """Call the loss on a micro-batch.

        Returns:
            What it returns, and its calls; None for one micro-batch alone, for a mini-batch that is not split along its
            samples, and for a compiled loss.
        """
        function, sizes = self._function, self._batch.sizes
        if function is None:
            return output, None
        values = (output,) if target is None else (output, target)
        moved = buffers_elsewhere(function, output)
        if len(sizes) == 1 or not self._batch.by_samples or _is_compiled(function):
            return call_with_buffers(function, values, moved), None
        leaves = pytree.tree_leaves(target)
        originals = {id(leaves[place]): leaf for place, leaf in self._common.items()}
        tape = Tape(originals | {id(copy): own for own, copy in moved.values()})
        given = self._give(tape, micro_batch, output, target)
        with tape:
            value = call_with_buffers(function, values, moved)
        self._constants.update(tape.constants)

        def analysis() -> Analysis:
            whole = None if function is loss_of else partial(call_whole, tape, given, function, values, moved)
            return Analysis(tape, given, Batch(sizes, micro_batch, self._regular, whole))

        return value, Followed(tape, analysis, self._patterns, self._counts)

    def _give(self, tape: Tape, micro_batch: int, output: Any, target: Any) -> dict[int, Given]:
        """Number the tensors of a micro-batch's output and target."""
        border = output.recording.border if isinstance(output, Unfinished) else ""
        given = {tape.give(leaf): Given(self._state(leaf, micro_batch, border)) for leaf in tensors(output)}
        for place, leaf in enumerate(pytree.tree_leaves(target)):
            if isinstance(leaf, Tensor) and leaf.dim() and place not in self._common:
                given[tape.give(leaf)] = Given(self._state(leaf, micro_batch), place)
        return given

    def _state(self, leaf: Tensor, micro_batch: int, border: str = "") -> Rows | Lost:
        """Return where a tensor holds samples; ``border`` is what the last layer ends with, if the model has a loss."""
        samples = self._batch.sizes[micro_batch]
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
        [
            leaf.shape[1:]
            for leaf in (*pytree.tree_leaves(one), *target)
            if isinstance(leaf, Tensor) and leaf.dim()
        ]
        for one, target in zip(batch.inputs, targets, strict=True)
    ]
    return all(other == shapes[0] for other in shapes)


def _is_compiled(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule) or hasattr(
        function, "_torchdynamo_orig_callable"
    )
