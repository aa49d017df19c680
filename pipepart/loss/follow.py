"""Traces a loss function on a micro-batch, to find the means and sums over samples that it consists of.

A tensor from the batch holds samples (:class:`~.operations.Rows`), or is a sum of terms, each a mean or a sum over
samples (:class:`~.terms.Terms`). Functions without a rule in :mod:`~.operations` make their result untracked
(:class:`~.operations.Lost`), with a reason for the error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from ..capture import Unfinished
from ..capture.recorded.refusal import line_of_user
from .call_log import CallLog
from .operations import (
    ALIKE,
    RULES,
    Call,
    Entry,
    Lost,
    LostError,
    Rows,
    State,
    elementwise,
    names,
)
from .sample_shape import Shape
from .shared import Shared
from .sums import DIVISIONS, combined, is_sum, least_of
from .terms import Count, Replay, Targets, Term, Terms
from .torch_losses import is_torch_loss, result_of

_HARMLESS = names(
    "dim ndim ndimension dtype device layout requires_grad is_leaf is_cuda is_cpu is_floating_point is_complex "
    "is_contiguous element_size itemsize get_device is_sparse is_mps is_meta is_quantized is_nested is_xpu names "
    "retain_grad grad_fn __hash__"
)
_SHAPES = names("shape size numel nelement __len__")
_NUMBERS = names("item __int__ __float__ __index__")
_READS = names(
    "item tolist numpy __float__ __int__ __bool__ __index__ __repr__ __format__ __array__ equal allclose"
)


_INSTEAD = {
    False: "read values last",
    True: "write flatten(1) for reshape(len(x), -1), and divide a sum over samples by it alone",
}


class Follower(TorchFunctionMode):
    """Traces one call of a loss function.

    Args:
        shared: of the step.
        micro_batch: which.
        trusted: whether the function is known to keep samples apart, as a loss of torch's own is.
        originals: the tensors that others, by their identity, are copies of.
        fixed: whether the numbers in the function do not follow the shapes, as in a recorded loss.
        known: what the function reads.
        literal: places of calls that divide by a constant, though that may be a multiple of the number of samples.

    Attributes:
        leaves: tensors that are not from the batch and get a gradient.
        counts_samples: whether the loss has read the number of samples.
        unknown_constants: whether it uses a tensor that is neither from the batch nor read by the function.
        reads_values: whether it has read a value of the batch or of another tensor.
        log: the calls that it has made.
    """

    def __init__(
        self,
        shared: Shared,
        micro_batch: int,
        trusted: bool,
        originals: dict[int, Tensor],
        fixed: bool = False,
        literal: Collection[int] = (),
        known: Collection[Any] = (),
    ) -> None:
        super().__init__()
        self.unknown_constants, self._known = False, known
        self.counts_samples, self.reads_values, self._fixed = False, False, fixed
        self.log = CallLog(())
        self._counts: list[tuple[float, Entry]] = []  # sums without a gradient whose values were read
        self._divisions: dict[int, float] = {}  # places in the log, and numbers taken for counts
        self._literal = literal
        self.leaves: dict[int, Tensor] = {}
        self._shared, self._micro_batch = shared, micro_batch
        self._sizes = shared.sizes
        self._trusted, self._originals = trusted, originals
        self._entries: dict[int, Entry] = {}
        self._read, self._reads_samples = "", False

    def begin(self, output: Any, target: Any, targets: Targets) -> None:
        """Register the tensors of a micro-batch's output and target. ``targets``: those of all micro-batches."""
        self.log = CallLog((output, target))
        border = output.recording.border if isinstance(output, Unfinished) else ""
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._give(leaf, ("output", place), None, border)
        for place, leaf in enumerate(pytree.tree_leaves(target)):
            if not isinstance(leaf, Tensor):
                continue
            all_given: list[Any] = [leaves[place] if place < len(leaves) else None for leaves in targets]
            if all(other is all_given[0] for other in all_given):
                self._originals[id(leaf)] = all_given[0]
            elif leaf.dim():
                self._give(leaf, ("target", place), lambda step, index, place=place: step[index][place])

    def taken(self, value: Any) -> tuple[Terms, int] | str:
        """Return the terms of the returned loss and the number of its expression, or the reason why there are none."""
        entry = self._entry(value)
        if isinstance(entry.state, Lost):
            return entry.state.reason
        if self._read and self._reads_samples and self.counts_samples:
            return f"it reads {self._read}, before it is finished: {_INSTEAD[True]}"
        if isinstance(entry.state, Terms) and entry.state.terms:
            return entry.state, entry.key
        return "what it returns is no sum of means and sums, or was computed where torch cannot be followed"

    def forget(self) -> None:
        """Release the tensors. Reference cycles would keep them until a garbage collection."""
        self._entries.clear()

    def count(self, value: Any) -> tuple[Replay | None, Hashable]:
        """Return a function that computes a count for other micro-batches, and the number of its expression."""
        entry = self._entry(value) if isinstance(value, Tensor) else None
        return (entry.replay, entry.key) if entry and entry.replay else (None, None)

    def _give(self, leaf: Tensor, name: Hashable, replay: Replay | None, border: str = "") -> None:
        """Note a tensor of the batch; ``border`` is what the last layer ends with, if the model computes its loss."""
        samples, state = self._sizes[self._micro_batch], None
        if not leaf.dim():
            where = f", as {border} belongs to the last layer with all before it" if border else ""
            state = Lost(
                f"it uses a scalar that the model returned, and what that is a mean of is not known{where}"
            )
        elif leaf.shape[0] % samples == 0 or self._trusted:
            state = Rows(0, self._shared.regular)
        elif leaf.dim() > 1 and leaf.shape[1] == samples:  # steps first, samples second
            state = Rows(1, self._shared.regular)
        else:
            shape = list(leaf.shape)
            state = Lost(f"it is given shape {shape}, whose first dimension is not that of {samples} samples")
        self._note(leaf, self._shared.number(name), state, replay)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {}, self._entry)
        result = self._result(call)
        self.log.note(func, call.leaves, result)
        return result

    def _result(self, call: Call) -> Any:
        """Return what a call gives, and note what that is."""
        if call.name in _HARMLESS and not call.in_place:
            return call.result
        if call.name in _SHAPES and call.states[0] is not None:
            return self._shape(call)
        key = self._key(call)
        try:
            found = self._found(call)
        except LostError as error:
            found = Lost(f"{call.name.strip('_')} at {line_of_user()} {error}")
        lost = next((state for state in call.states if isinstance(state, Lost)), None)
        self._note_result(call, key, lost or found)
        return call.result

    def _found(self, call: Call) -> State | list[Rows]:
        """What the result of a call is, which runs here or later."""
        states = [state for state in call.states if state is not None]
        if any(isinstance(state, Lost) for state in states):
            return None
        call.check_arguments()
        if not states:
            if call.name not in ALIKE:
                raise LostError("is not known to give the same for every micro-batch")
            return None
        if self._read:
            return Lost(f"it reads {self._read}, before it is finished: {_INSTEAD[self._reads_samples]}")
        sums = any(isinstance(state, Terms) for state in states)
        if is_torch_loss(call.function):
            if sums:
                raise LostError("takes a sum over samples, which differs from that of the mini-batch")
            found = result_of(call, self._in_proportion, self._sizes[self._micro_batch], self._trusted)
            return found if isinstance(found, Rows) or self._trusted else self._apart(call, found)
        if sums:
            return combined(call, self._count_of)
        if call.name in ("sum", "mean") and not call.result.dim():
            return self._apart(call, self._reduced(call))
        rule = RULES.get(call.name)
        if rule is None or (call.in_place and rule is not elementwise):
            raise LostError("is not known to keep samples apart")
        return rule(call)

    def _reduced(self, call: Call) -> Terms:
        """The mean or the sum of all elements."""
        tensor, rows = call.single()
        if call.name == "sum":
            return Terms((Term(call.result),))
        number = float(tensor.numel())
        count = Count(number, self._in_proportion(number) if rows.regular else None, rows.regular)
        return Terms((Term(call.result, divisor=count, divided=True),))

    def _apart(self, call: Call, found: Terms) -> Terms:
        """Clone the term: in-place code in the loss must not change the tensor that the backward starts from."""
        call.result = call.result.clone()
        return found

    def _in_proportion(self, number: float) -> Replay:
        """What gives a number that is in proportion to the samples of a micro-batch."""
        sizes, own = self._sizes, self._sizes[self._micro_batch]
        return lambda _, index: number * sizes[index] / own  # holds no `self`, which holds it

    def _note_result(self, call: Call, key: int, found: State | list[Rows]) -> None:
        """Note what the tensors are that a call has made or written."""
        result, tracked = call.result, any(state is not None for state in call.states)
        made = tensors(result)
        if not made and (tracked or call.name in _READS):
            self.reads_values = True
        if tracked and not made and call.name in _NUMBERS and not self._fixed and self._is_count(call):
            self._counts.append((float(result), call.entries[0]))  # type: ignore[arg-type]
            return
        if tracked and (not made or (call.in_place and isinstance(found, Lost))):
            self._read = self._read or f"a value, {call.name.strip('_')} at {line_of_user()}"
        if not made and tracked and call.name not in _READS:  # it may have changed what it was given
            changed = Lost(f"it changes a tensor with {call.name} at {line_of_user()}")
            for place, (entry, state) in enumerate(zip(call.entries, call.states, strict=True)):
                if entry is not None and (state is not None or not place):
                    self._note(entry.tensor, key, changed)
        elif not made and call.name == "__setitem__":
            self._note(call.leaves[0], key)
        if not tracked and not call.in_place and any(result is leaf for leaf in call.leaves):
            return  # a constant that is what was asked for already
        replay = (
            None if isinstance(found, Lost | list) or not isinstance(result, Tensor) else self._replay(call)
        )
        several = found if isinstance(found, list) else [found] * len(made)
        for index, (tensor, state) in enumerate(zip(made, several, strict=True)):
            own = key if tensor is result else self._shared.number((key, index))
            self._note(tensor, own, state, replay)

    def _replay(self, call: Call) -> Replay | None:
        """What computes the result for another micro-batch, if it comes from the target and constants alone."""
        tracked = [entry for entry in call.entries if entry and entry.state is not None]
        if isinstance(tracked[0].state if tracked else None, Terms) and least_of(call) is not None:
            return tracked[0].replay  # what is bounded is the sum over all micro-batches
        replays = {id(entry.tensor): entry.replay for entry in tracked if entry.replay is not None}
        if not tracked or any(id(entry.tensor) not in replays for entry in tracked):
            return None
        return lambda *step: call.again(
            lambda leaf: replays[id(leaf)](*step) if id(leaf) in replays else leaf  # type: ignore[misc]
        )

    def _shape(self, call: Call) -> Any:
        """An extent or all of them, unless it may be that of samples."""
        result, state = call.result, call.states[0]
        if self._trusted or isinstance(state, Terms):
            return result
        if isinstance(state, Rows) and isinstance(result, torch.Size):
            shape = Shape(result)
            shape.dim, shape.compared = state.dim, self._leaked
            shape.leak = self._leaked if self._fixed or not state.regular else self._counted
            return shape
        dim = call.argument(1, "dim") if call.name == "size" else None
        if not isinstance(state, Rows) or not state.regular or self._fixed:
            if not isinstance(state, Rows) or dim is None or dim % call.leaves[0].dim() == state.dim:
                self._leaked()
        elif dim is None or dim % call.leaves[0].dim() == state.dim:
            self._counted()
        return result

    def _counted(self) -> None:
        self.counts_samples = True

    def _is_count(self, call: Call) -> bool:
        state = call.states[0]
        return isinstance(state, Terms) and is_sum(state) and not call.leaves[0].requires_grad

    def _count_of(self, number: float) -> Count | None:
        """Return the count that a divisor is, and note that it is taken for one."""
        found = self._matching(number)
        if found is not None and found.in_proportion:
            self._divisions[len(self.log.calls)] = float(number)
        return found

    def _matching(self, number: float) -> Count | None:
        """Return the count that a number is: a sum that was read, or a number of samples."""
        for value, entry in self._counts:
            if number in (value, max(value, 1.0)):
                return Count(value, _as_number(entry.replay), least=0.0 if number == value else 1.0)
        samples = self._sizes[self._micro_batch]
        if not self.counts_samples or len(self.log.calls) in self._literal or number <= 0 or number % samples:
            return None
        return Count(float(number), self._in_proportion(float(number)), in_proportion=True)

    def check_numbers(self, function: Callable[[Any], Any], given: tuple[Any, ...]) -> set[int]:
        """Call a loss with as many samples as the mini-batch has, and see which of its numbers depend on that.

        Divisors of sums must be proportional to the number of samples, and no other number may depend on it.

        Returns:
            The positions of calls whose numbers were assumed to be counts, but do not depend on the number of samples.
        """
        samples = self._sizes[self._micro_batch]
        whole = sum(self._sizes)
        other = pytree.tree_map_only(Tensor, lambda leaf: self._repeated(leaf, whole, samples), given)
        log = CallLog(other)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), log:
            function(other)
        if [name for name, _ in log.calls] != [name for name, _ in self.log.calls]:
            self._leaked()
            return set()
        literal: set[int] = set()
        for place, ((_, own), (_, theirs)) in enumerate(zip(self.log.calls, log.calls, strict=True)):
            changed = [pair for pair in zip(own, theirs, strict=False) if pair[0] != pair[1]]
            count = self._divisions.get(place)
            if count is not None and not changed:
                literal.add(place)
            elif changed != ([] if count is None else [(count, count * whole / samples)]):
                self._leaked()
        return literal

    def _repeated(self, leaf: Tensor, whole: int, samples: int) -> Tensor:
        """Return a tensor of some samples with as many as the mini-batch has, each of them several times."""
        entry, leaf = self._entries.get(id(leaf)), leaf.detach()
        if entry is None or not isinstance(entry.state, Rows):
            return leaf
        dim = entry.state.dim
        rows = torch.arange(leaf.shape[dim] * whole // samples, device=leaf.device) % leaf.shape[dim]
        return leaf.index_select(dim, rows)

    def _leaked(self) -> None:
        if not self._read:
            self._read, self._reads_samples = f"the number of samples at {line_of_user()}", True

    def _key(self, call: Call) -> int:
        """The number of a call's result."""
        pairs = zip(call.leaves, call.entries, strict=True)
        divides = call.name in DIVISIONS and (self.counts_samples or self._counts)
        tokens = (
            entry.key if entry else "count" if divides and self._matching(leaf) else _token(leaf)
            for leaf, entry in pairs
        )
        return self._shared.number((call.name, *tokens))

    def _entry(self, tensor: Tensor) -> Entry:
        entry = self._entries.get(id(tensor))
        if entry is None:
            return self._unseen(tensor)
        if entry.version != version(tensor) or entry.node is not tensor.grad_fn:
            changed = (
                "it uses a tensor that was changed where torch cannot be followed, as by a custom Function"
            )
            return Entry(tensor, entry.version, entry.node, entry.key, Lost(changed))
        return entry

    def _unseen(self, tensor: Tensor) -> Entry:
        """A constant, or a tensor that was computed from the batch unseen."""
        state = None
        if not tensor.is_leaf:
            state = Lost(
                "it uses a tensor that was computed where torch cannot be followed, as in compiled or scripted code"
            )
        elif tensor.requires_grad:
            self.leaves[id(tensor)] = tensor
        original = self._originals.get(id(tensor), tensor)
        self.unknown_constants |= not any(original is one for one in self._known)
        key = self._shared.constant(original)
        return Entry(tensor, version(tensor), tensor.grad_fn, key, state)

    def _note(self, tensor: Tensor, key: int, state: State = None, replay: Replay | None = None) -> None:
        self._entries[id(tensor)] = Entry(tensor, version(tensor), tensor.grad_fn, key, state, replay)


def _as_number(replay: Replay | None) -> Replay | None:
    return replay and (lambda *step: float(replay(*step)))


def _token(leaf: Any) -> Hashable:
    """What names an argument that is no tensor in every micro-batch of a step."""
    if isinstance(leaf, slice):
        return "slice", *map(_token, (leaf.start, leaf.stop, leaf.step))
    plain = isinstance(leaf, int | float | str | torch.dtype | torch.device | type(None))
    return type(leaf).__name__, leaf if plain else id(leaf)
