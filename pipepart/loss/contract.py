"""The loss of a step: called once for each micro-batch, and put together to that of the mini-batch.

The loss of the mini-batch is a sum of terms, each of them a sum over all micro-batches divided by a total count. The
gradient of a micro-batch's term is therefore known once the total is. Totals that later micro-batches bring are
predicted from their targets, or assumed in proportion to their sizes. Where that was wrong, all gradients of the step
are off by one factor, which :meth:`MiniBatchLoss.correction` gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..data.split import MicroBatches
from .buffers import buffers_on_device_of
from .expressions import Expressions
from .follow import Follower, Lost
from .reduction import Reduction, declared_reduction, is_torchs_own
from .refusal import LossError, refusal, title
from .scalar import check_gradient, check_scalar, is_pair
from .sums import Sum
from .terms import Count, Term, on_host, total_of, whole_of

LossFunction = Callable[..., Any]  # a scalar tensor, or (sum, count)


_NO_LOSS = "the model computes no scalar loss of its own and no loss_fn is given: its output"


class Taken(NamedTuple):
    """The loss of one micro-batch.

    Attributes:
        value: what the loss function returned, for a report.
        roots: the tensors at which gradients enter, one for each term; of a single term the value itself.
        terms: what it is made of.
        shift: a number that it adds.
        key: equal for micro-batches whose losses were computed alike.
    """

    value: Tensor
    roots: tuple[Tensor, ...]
    terms: tuple[Term, ...]
    shift: float = 0.0
    key: Hashable = None


class StepLoss:
    """The loss of a pipeline's steps.

    Args:
        loss_fn: the loss; None where the model computes it.
        reduction: how losses of micro-batches make up that of the mini-batch; None to see it.

    Raises:
        LossError: the loss states that it does not reduce, or another reduction than is declared.
    """

    def __init__(self, loss_fn: LossFunction | None, reduction: Reduction | None = None) -> None:
        stated = declared_reduction(loss_fn)
        self.function = loss_fn
        self.reduction = reduction
        self.torchs_own = is_torchs_own(loss_fn)
        if self.torchs_own and reduction not in (None, Reduction.BATCH, stated):
            raise LossError(
                f"{title(loss_fn)} has reduction={stated!s}, and reduction={reduction!s} is declared"
            )
        if loss_fn is None and reduction is Reduction.BATCH:
            raise LossError(
                "reduction='batch' needs a loss_fn: a model that computes its own loss sees one micro-batch"
            )

    def of_batch(self, batch: MicroBatches) -> MiniBatchLoss:
        """The loss of a mini-batch that has been split."""
        return MiniBatchLoss(self, batch)


class MiniBatchLoss:
    """The losses of the micro-batches of one step. Called by one thread at a time.

    Attributes:
        leaves: tensors beside the model's parameters that get a gradient from the loss, as its own parameters do.
    """

    def __init__(self, loss: StepLoss, batch: MicroBatches) -> None:
        self.leaves: dict[int, Tensor] = {}
        self._loss = loss
        self._batch = batch
        self._shared = _in_all(batch.targets)
        self._expressions = Expressions()
        self._taken: dict[int, Taken] = {}
        self._totals: list[float | Tensor] | None = None
        self._lock = threading.Lock()
        self.certain = True

    def take(self, micro_batch: int, output: Any, target: Any) -> Taken:
        """The loss of a micro-batch.

        Args:
            micro_batch: which.
            output: of the model.
            target: of the micro-batch, on the output's device.

        Raises:
            LossError: it is no scalar with a gradient, or cannot be put together from those of micro-batches.
        """
        function, samples = self._loss.function, self._batch.sizes[micro_batch]
        alone = len(self._batch.sizes) == 1
        follower = None
        if function is not None and not alone and not _is_compiled(function):
            follower = Follower(samples, self._shared, self._expressions, self._loss.torchs_own)
            if self._batch.by_samples or self._loss.torchs_own:
                follower.begin(output, target)
        with buffers_on_device_of(output, function), follower or nullcontext():
            value = (
                output
                if function is None
                else function(output)
                if target is None
                else function(output, target)
            )
        if follower is not None:
            self.leaves.update(follower.leaves)
        taken = self._terms_of(value, samples, alone, follower)
        if torch.is_grad_enabled() and _has_graph(output):
            check_gradient(value[0] if is_pair(value) else value, function)
        with self._lock:
            self._check_alike(taken)
            self._taken[micro_batch] = taken
        return taken

    def weights(self, micro_batch: int) -> list[float | Tensor]:
        """The gradients at the roots of a micro-batch that has been taken."""
        with self._lock:
            if self._totals is None:
                self._totals = self._total_counts()
            taken = self._taken[micro_batch]
            pairs = zip(taken.terms, self._totals, strict=True)
            if taken.roots[0] is not taken.value:
                return [term.weight(total) for term, total in pairs if term.tensor.requires_grad]
            term, total = next(pairs)  # the coefficients are in the value
            return [term._replace(coefficient=1.0).weight(total) if term.divided else 1.0]

    def correction(self) -> float:
        """What all gradients of the step are to be multiplied by, once all micro-batches have been taken.

        Raises:
            LossError: different terms need different factors.
        """
        if self._totals is None or len(self._taken) < len(self._batch.sizes):
            return 1.0
        factors = set()
        for index, (total, term) in enumerate(zip(self._totals, self._taken[0].terms, strict=True)):
            if term.divisor is None:
                factors.add(1.0)
                continue
            real = term.divisor.of(self._real_total(index))
            ratio = term.divisor.of(total) / real if not isinstance(real, float) or real else 1.0
            factors.add(float(ratio))
        if len(factors) > 1:
            raise refusal(
                self._loss.function,
                "it has several terms, what they are divided by depends on the output or on values of the target in a "
                "way that is only known when all losses are, and backwards begin before; schedule='gpipe' with "
                "recompute='never' computes all losses first",
            )
        return factors.pop() if factors else 1.0

    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been taken."""
        taken = [taken for _, taken in sorted(self._taken.items())]
        first = taken[0]
        home, dtype = first.value.device, first.value.dtype
        if first.roots and first.roots[0] is first.value:  # all terms have one weight
            shared = first.terms[0]._replace(coefficient=1.0)
            parts = [(shared._replace(tensor=one.value, divisor=one.terms[0].divisor),) for one in taken]
            shift = first.shift * (1 - len(taken)) if shared.divisor is None else 0.0  # is in each value
            return (whole_of([terms[0] for terms in parts], self._real_total(0), home) + shift).to(dtype)
        columns = enumerate(zip(*(one.terms for one in taken), strict=True))
        total = torch.stack(
            [whole_of(terms, self._real_total(index), home) for index, terms in columns]
        ).sum()
        return (total + first.shift).to(dtype)

    def value(self, micro_batch: int) -> Tensor | None:
        """The loss of a micro-batch, 0 where nothing counts; None if it has not been taken."""
        taken = self._taken.get(micro_batch)
        if taken is None:
            return None
        value = taken.value.detach()
        for term in taken.terms:
            if term.divisor is not None and term.divided:
                nothing = torch.as_tensor(term.divisor.value, device=value.device) == 0
                value = value.masked_fill(nothing, 0.0)
        return value

    def _terms_of(self, value: Any, samples: int, alone: bool, follower: Follower | None) -> Taken:
        """What a loss is made of: as it is declared or returned, or as it was seen."""
        function, declared = self._loss.function, self._loss.reduction
        if is_pair(value):
            total, count = value
            part = on_host(count.detach()) if isinstance(count, Tensor) else float(count)
            if isinstance(part, float) and not 0 <= part < float("inf"):
                raise LossError(
                    f"{title(function)} returned (sum, count) with count {part:g}: a count is 0 or more"
                )
            known = follower.found(count) if follower is not None and isinstance(count, Tensor) else None
            replay = known.replay if isinstance(known, Sum) and _is_bare(known) else None
            predict = (lambda target: on_host(replay(target))) if replay is not None else None  # type: ignore[misc]
            steady = not isinstance(count, Tensor)
            term = Term(total, divisor=Count(part, predict=predict, steady=steady))
            return Taken(total / count, (total,), (term,))
        loss = check_scalar(value, _NO_LOSS if function is None else title(function))
        if alone:
            return Taken(loss, (loss,), (Term(loss),))
        found = follower.found(loss) if follower is not None else None
        if isinstance(found, Sum) and _fits(found, declared):
            return _as_taken(loss, found)
        if declared is Reduction.SUM:
            return Taken(loss, (loss,), (Term(loss),))
        if declared is Reduction.MEAN and not self._batch.by_samples:
            raise refusal(
                function, "the mini-batch is not split along its samples, so a mean over them has no parts"
            )
        if declared is Reduction.MEAN:
            count = Count(float(samples), whole=float(sum(self._batch.sizes)))
            term = Term(loss, divisor=count, divided=True)
            return Taken(loss, (loss,), (term,))
        if isinstance(found, Lost):
            split = "the mini-batch is not split along its samples"
            raise refusal(function, found.reason if self._batch.by_samples else split)
        if function is None:
            raise refusal(None, "what it is a mean of is not known: the last layer returns a scalar")
        raise refusal(function, "it is compiled, so that it cannot be followed")

    def _check_alike(self, taken: Taken) -> None:
        """Refuses micro-batches whose losses were computed in different ways."""
        for index, other in self._taken.items():
            if other.key != taken.key or len(other.terms) != len(taken.terms):
                raise refusal(
                    self._loss.function,
                    f"it computes something else than for micro-batch {index}: other functions, numbers or constants, "
                    "as where it keeps state from call to call",
                )
            return

    def _total_counts(self) -> list[float | Tensor]:
        """The counts of the mini-batch, known or assumed; before the first backward."""
        number, terms = min((number, taken.terms) for number, taken in self._taken.items())
        complete = len(self._taken) == len(self._batch.sizes)
        found: list[float | Tensor] = []
        for index, term in enumerate(terms):
            if term.divisor is None:
                found.append(1.0)
            elif complete:
                found.append(self._real_total(index))
            else:
                predicted = term.divisor.whole or self._predicted(term.divisor)
                if predicted is None:
                    predicted = self._in_proportion(number, term.divisor)
                    self.certain &= term.divisor.steady and not self._is_ragged()
                found.append(predicted)
        return found

    def _real_total(self, index: int) -> float | Tensor:
        """The count of the mini-batch; 1 for a sum, which has none."""
        counts = [taken.terms[index].divisor for _, taken in sorted(self._taken.items())]
        known = [count for count in counts if count is not None]
        if not known:
            return 1.0
        return known[0].whole or total_of([count.value for count in known])

    def _predicted(self, count: Count) -> float | Tensor | None:
        if count.predict is None:
            return None
        try:
            with torch.no_grad():
                return total_of([count.predict(target) for target in self._batch.targets])
        except Exception:  # calls for one micro-batch may not do for another: its count is assumed
            return None

    def _in_proportion(self, number: int, count: Count) -> float | Tensor:
        sizes = [_elements(i, t) for i, t in zip(self._batch.inputs, self._batch.targets, strict=True)]
        factor = sum(sizes) / sizes[number]
        if isinstance(count.value, Tensor):
            return torch.where(count.value == 0, 1.0, count.value) * factor
        return (count.value or 1.0) * factor

    def _is_ragged(self) -> bool:
        """Return True if micro-batches differ in more than the number of samples."""
        shapes = [
            [leaf.shape[1:] for leaf in pytree.tree_leaves(pair) if isinstance(leaf, Tensor) and leaf.dim()]
            for pair in zip(self._batch.inputs, self._batch.targets, strict=True)
        ]
        return any(other != shapes[0] for other in shapes)


def _has_graph(output: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output))


def _as_taken(loss: Tensor, found: Sum) -> Taken:
    """Gradients enter at the loss itself where all its terms have one weight, as in plain training."""
    terms = found.terms
    plain = all(term.divisor is None for term in terms) or (len(terms) == 1 and terms[0].divided)
    roots = (loss,) if plain else tuple(term.tensor for term in terms if term.tensor.requires_grad)
    return Taken(loss, roots, terms, found.shift, found.key)


def _fits(found: Sum, declared: Reduction | None) -> bool:
    """Return True if what was seen is what was declared."""
    if declared is None:
        return True
    return all((term.divisor is None) == (declared is Reduction.SUM) for term in found.terms)


def _is_bare(known: Sum) -> bool:
    """Return True for one sum that is not scaled."""
    return (
        known.shift == 0 and known.floor is None and len(known.terms) == 1 and known.terms[0].coefficient == 1
    )


def _is_compiled(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule) or hasattr(
        function, "_torchdynamo_orig_callable"
    )


def _in_all(targets: Sequence[Any]) -> set[int]:
    """The places in a target of what all micro-batches have in common."""
    rows = [pytree.tree_leaves(target) for target in targets]
    columns = enumerate(zip(*rows, strict=False))
    return {place for place, column in columns if all(leaf is column[0] for leaf in column)}


def _elements(value: Any, target: Any) -> int:
    """The size of a micro-batch: elements of the first tensor of its target, or of its input."""
    for leaf in (*pytree.tree_leaves(target), *pytree.tree_leaves(value)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return max(leaf.numel(), 1)
    return 1
