"""Computes the loss of a mini-batch from the losses of its micro-batches.

The loss of the mini-batch is a sum of terms, each of them a sum over all micro-batches divided by a total count. The
gradient of a micro-batch's term is therefore known once the total is. Totals that later micro-batches bring are
computed from their targets, or assumed in proportion to their sizes. Where that was wrong, all gradients of the step
are off by one factor, which :meth:`MiniBatchLoss.correction` gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd.own_copy import leaves_of, tensors
from ..capture import loss_of
from ..data.split import MicroBatches
from ..workers.streams import has_streams, hold_for_caller
from .analysis import Pattern
from .following import Followed, Following
from .reduction import Reduction, StepLoss
from .returned import LossError, check_gradient, check_returned, check_scalar, is_pair, refusal, title
from .sums import Values
from .terms import MicroBatchLoss, Replay, Term, on_host, total_of, whole_of, without_slack

_HOST = torch.device("cpu")


class MiniBatchLoss:
    """Combines the losses of the micro-batches of one step.

    One thread at a time calls :meth:`take`, and one at a time :meth:`weights`. The rest is for the end of the step.

    Args:
        loss: of the steps.
        batch: the mini-batch.
        shared_out: whether others take some of the micro-batches: other processes, or workers on other streams.

    Attributes:
        leaves: tensors beside the model's parameters that get a gradient from the loss, as its own parameters do.
        certain: whether :meth:`correction` is 1, whatever later micro-batches bring.
    """

    def __init__(self, loss: StepLoss, batch: MicroBatches, shared_out: bool = False) -> None:
        self.leaves: dict[int, Tensor] = {}
        self.certain = True
        self._loss = loss
        self._batch = batch
        self._shared_out = shared_out
        self._targets = [leaves_of(target) for target in batch.targets]
        self._following = Following(loss, batch, self._targets)
        self._taken: list[MicroBatchLoss | None] = [None] * len(batch.sizes)
        self._first: tuple[int, MicroBatchLoss] | None = None  # the micro-batch that was taken first
        self._has_slack = True
        self._mean: Pattern | None = None  # of the first micro-batch, if that is one mean with a graph
        self._totals: list[float | Tensor] | None = None
        # By micro-batch and term: the counts that were computed from the targets.
        self._counts: list[dict[int, float | Tensor]] = [{} for _ in batch.sizes]
        self._replays: tuple[Replay | None, ...] = ()  # of the first micro-batch, until the totals are known

    def take(self, micro_batch: int, output: Any, target: Any) -> list[Tensor]:
        """Compute the loss of a micro-batch and add it to the step; return the tensors where its backward starts.

        Args:
            micro_batch: which.
            output: of the model.
            target: of the micro-batch, on the output's device.

        Raises:
            LossError: it is no scalar with a gradient, or cannot be put together from those of micro-batches.
        """
        known = self._following.known(micro_batch, output, target)
        if known is None:
            taken = self._computed(micro_batch, output, target)
        elif known[1] is self._mean:
            return [self._take_mean(micro_batch, *known)]
        elif isinstance(known[0], Tensor):
            value, pattern, values = known
            taken = pattern.loss(value, values, self._counts[micro_batch])
        else:
            taken = self._of_pattern(*known, self._counts[micro_batch])
        if self._first is None:
            self._first, self._replays = (micro_batch, taken), taken.replays
            self._has_slack = taken.has_slack  # the micro-batches after it have no more samples
            if known is not None and known[1].is_mean and taken.value.requires_grad:
                self._mean = known[1]
        elif self._first[1].key is not taken.key:  # not of one pattern
            self._check_alike(taken, *self._first)
        self._taken[micro_batch] = taken
        return taken.drop_graph(self._has_slack)  # whoever holds a step that failed holds what was taken

    def _take_mean(self, micro_batch: int, value: Tensor, pattern: Pattern, values: Values) -> Tensor:
        """Add a loss that is one mean, as that of the first micro-batch; return where its backward starts.

        This is what :meth:`Pattern.loss` and :meth:`MicroBatchLoss.drop_graph` do, in half the time, for most losses.
        """
        part, known = pattern.parts[0], self._counts[micro_batch].get(0)
        divisor: Any = part.divisor
        count = known if type(known) is float else divisor.part(values)
        kept = without_slack(value.detach()) if self._has_slack else value.detach()
        term = Term(kept, part.coefficient, count, True, divisor.least, True)
        self._taken[micro_batch] = MicroBatchLoss(kept, (term,), pattern.shift, pattern.key)
        return value

    def taken(self, device: torch.device = _HOST) -> dict[int, MicroBatchLoss]:
        """Return the losses computed here, by micro-batch, copied to a device."""
        return {index: loss.on(device) for index, loss in enumerate(self._taken) if loss is not None}

    @property
    def device(self) -> torch.device:
        """Where the first loss that was computed here is."""
        return next(loss.value.device for loss in self._taken if loss is not None)

    def adopt(self, taken: Mapping[int, MicroBatchLoss]) -> None:
        """Add the losses of micro-batches that others computed.

        Raises:
            LossError: they were computed in another way.
        """
        for index, loss in taken.items():
            if self._taken[index] is None:
                self._taken[index] = loss
        if len({len(loss.terms) for loss in self._taken if loss is not None}) > 1:
            raise refusal(
                self._loss.function, "it computes something else for some micro-batches than for others"
            )

    def weights(self, micro_batch: int) -> list[tuple[float | Tensor, Tensor]]:
        """Return the gradients from which the backward of a micro-batch starts, and the tensors that they are of.

        The tensors have no graphs any more.

        Raises:
            LossError: it has several terms, and not all of their totals are known.
        """
        taken = self._taken[micro_batch]
        assert taken is not None
        if self._totals is None:
            self._totals = self._known_or_assumed(micro_batch, taken)
            self._replays = ()
        if len(taken.terms) == 1:  # most losses: the loop below takes as long as the rest of this method
            (term,), (total,) = taken.terms, self._totals
            return [(term.weight(total), term.tensor)] if term.trains else []
        return [
            (term.weight(total), term.tensor)
            for term, total in zip(taken.terms, self._totals, strict=True)
            if term.trains
        ]

    def correction(self) -> float:
        """Return the factor for all gradients of the step, after the losses of all micro-batches are known.

        Raises:
            LossError: a count of some micro-batch is not the one that was computed from its target.
        """
        first = self._taken[0]
        if self._totals is None or first is None or None in self._taken:
            return 1.0
        for index, term in enumerate(first.terms):
            if term.trains:
                used = self._totals[index]
                if self.certain and isinstance(used, Tensor):
                    continue
                real = self._real_total(index)
                if not self.certain:
                    return float(used) / float(real) if real else 1.0
                if (
                    isinstance(used, float)
                    and isinstance(real, float)
                    and abs(used - real) > 1e-9 * abs(real)
                ):
                    raise refusal(
                        self._loss.function, f"it divides by {real:g}, and by {used:g} in a second call"
                    )
        return 1.0

    def total(self) -> Tensor:
        """Return the loss of the mini-batch, after the losses of all micro-batches are known."""
        taken = [loss for loss in self._taken if loss is not None]
        value = taken[0].value
        if has_streams(value.device):  # workers have computed them, and the caller's streams read them
            numbers = [(term.tensor, term.coefficient, term.divisor) for loss in taken for term in loss.terms]
            hold_for_caller(tensors([numbers, [(loss.value, loss.shift) for loss in taken]]))
        columns = enumerate(zip(*(loss.terms for loss in taken), strict=True))
        wholes = [whole_of(terms, self._real_total(index), value.device) for index, terms in columns]
        total = wholes[0] if len(wholes) == 1 else torch.stack(wholes).sum()
        return (total + taken[0].shift).to(value.device, value.dtype)

    def differentiable_total(self, roots: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the loss of the mini-batch with the graph of the roots of all micro-batches."""
        total = self.total().detach()
        if not torch.is_grad_enabled():
            return total
        parts = [
            (root * weight).sum().to(total.device, total.dtype)
            for index, loss_root in enumerate(roots)
            for root, (weight, _) in zip(loss_root, self.weights(index), strict=True)
        ]
        if not parts:
            return total
        graph = torch.stack(parts).sum()
        return total + (graph - graph.detach())

    def shares(self) -> list[float] | None:
        """Return the weight of each micro-batch's loss in the loss of the mini-batch, after all are known.

        None if the terms of the loss have different ones.
        """
        taken = [loss for loss in self._taken if loss is not None]
        if any(isinstance(loss.shift, Tensor) or loss.shift for loss in taken):
            return None
        totals = [self._real_total(index) for index in range(len(taken[0].terms))]
        pairs = [zip(loss.terms, totals, strict=True) for loss in taken]
        shares = [{float(term.share_of(total)) for term, total in pair} for pair in pairs]
        return [share.pop() for share in shares] if all(len(share) == 1 for share in shares) else None

    def _computed(self, micro_batch: int, output: Any, target: Any) -> MicroBatchLoss:
        """Call a loss whose calls are not certain, and return what it is made of."""
        value, followed = self._following.call(micro_batch, output, target)
        taken = self._as_taken(value, micro_batch, followed)
        if followed is not None:
            self.leaves.update(followed.tape.leaves)
            followed.tape.forget()
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors(output)):
            check_gradient(value[0] if is_pair(value) else value, self._loss.function)
        return taken

    def _as_taken(self, value: Any, micro_batch: int, followed: Followed | None) -> MicroBatchLoss:
        """Return what a loss is made of: as it is declared or returned, or as its calls show."""
        function, declared = self._loss.function, self._loss.reduction
        if is_pair(value):
            return self._of_pair(value[0], value[1], followed)
        is_own = function is None or function is loss_of
        if not isinstance(value, Tensor) or value.dim():
            check_returned(value) if is_own else check_scalar(value, title(function))
        loss: Tensor = value
        if len(self._batch.sizes) == 1:
            return MicroBatchLoss(loss, (Term(loss),))
        pattern: Any = "it is compiled, so that it cannot be followed"
        if followed is not None:
            pattern = self._following.pattern(followed, loss)
        elif function is None:
            pattern = "what it is a mean of is not known: the last layer returns a scalar"
        if followed is not None and isinstance(pattern, Pattern):
            self._check_declared(pattern)
            self._check_counts(pattern, followed)
            return pattern.loss(loss, followed.tape.value)
        if declared is Reduction.SUM:
            return MicroBatchLoss(loss, (Term(loss),))
        if not self._batch.by_samples:
            raise refusal(function, "the mini-batch is not split along its samples")
        if declared is Reduction.MEAN:
            sizes = self._batch.sizes
            term = Term(loss, divisor=float(sizes[micro_batch]), divided=True)
            return MicroBatchLoss(loss, (term,), replays=(lambda _: list(map(float, sizes)),))
        raise refusal(function, pattern)

    def _check_declared(self, pattern: Pattern) -> None:
        sums, declared = {part.divisor is None for part in pattern.parts}, self._loss.reduction
        if declared is not None and sums == {declared is not Reduction.SUM}:
            kind = "mean" if declared is Reduction.SUM else "sum"
            raise LossError(
                f"{title(self._loss.function)} is a {kind} over samples, and reduction={declared!s} is declared"
            )

    def _check_counts(self, pattern: Pattern, followed: Followed) -> None:
        if pattern.writes_counts(followed.tape):
            raise refusal(self._loss.function, "it writes into a tensor by which it counts")

    def _of_pair(self, total: Tensor, count: Tensor | float, followed: Followed | None) -> MicroBatchLoss:
        """Return what ``(sum, count)`` is made of."""
        pattern = None if followed is None else self._following.count(followed, count)
        if followed is not None and pattern is not None:
            self._check_counts(pattern, followed)
            return self._of_pattern((total, count), pattern, followed.tape.value, {})
        part = on_host(count.detach()) if isinstance(count, Tensor) else float(count)
        return self._divided(total, count, part)

    def _of_pattern(
        self, value: Any, pattern: Pattern, values: Values, counts: Mapping[int, float | Tensor]
    ) -> MicroBatchLoss:
        """Return what a loss is made of; arguments beside the pattern are as for :meth:`Pattern.loss`."""
        if isinstance(value, Tensor) or not is_pair(value):
            return pattern.loss(value, values, counts)
        (total, count), (term,) = value, pattern.loss(value[0], values, counts).terms
        assert term.divisor is not None
        taken = self._divided(total, count, term.divisor, term.least)
        taken.key, taken.replays = pattern.key, pattern.replays
        return taken

    def _divided(
        self, total: Tensor, count: Tensor | float, part: float | Tensor, least: float = -math.inf
    ) -> MicroBatchLoss:
        if isinstance(part, float) and not 0 <= part < float("inf"):
            raise LossError(
                f"{title(self._loss.function)} returned (sum, count) with count {part:g}: a count is 0 or more"
            )
        return MicroBatchLoss(total / count, (Term(total, divisor=part, least=least),), replays=(None,))

    def _check_alike(self, taken: MicroBatchLoss, first: int, other: MicroBatchLoss) -> None:
        """Refuse a micro-batch whose loss was computed in another way than that of the first."""
        if other.key != taken.key or len(other.terms) != len(taken.terms):
            raise refusal(
                self._loss.function,
                f"it computes something else than for micro-batch {first}: other functions, numbers or "
                "constants, as where it keeps state from call to call",
            )

    def _known_or_assumed(self, micro_batch: int, taken: MicroBatchLoss) -> list[float | Tensor]:
        """Return the totals of the terms, before the first backward."""
        complete = None not in self._taken
        totals: list[float | Tensor] = []
        replays = self._replays or (None,) * len(taken.terms)
        for index, term in enumerate(taken.terms):
            known = None
            if term.divisor is None or not term.trains:
                known = 1.0
            elif complete:
                known = self._real_total(index)
            elif (replay := replays[index]) is not None:
                known = self._computed_total(index, term, replay)
            if known is None:
                self.certain = False
                known = self._in_proportion(micro_batch, term)
            if isinstance(known, Tensor):  # computed from targets, which may be on another device
                known = known.to(term.tensor.device)
            totals.append(known)
        if not self.certain and sum(term.trains for term in taken.terms) > 1:
            raise refusal(
                self._loss.function,
                "it has several terms, and what one of them is divided by depends on the outputs of later "
                "micro-batches, while backwards begin before; schedule='gpipe' with recompute='never' computes all "
                "losses first",
            )
        return totals

    def _real_total(self, index: int) -> float | Tensor:
        """Return the count of the mini-batch; 1 for a sum, which has none."""
        terms = [taken.terms[index] for taken in self._taken if taken is not None]
        counts = [term.divisor for term in terms if term.divisor is not None]
        return terms[0].bounded(total_of(counts)) if counts else 1.0

    def _computed_total(self, index: int, term: Term, replay: Replay) -> float | Tensor | None:
        try:
            with torch.no_grad():
                counts = replay(self._targets)
                for known, count in zip(self._counts, counts, strict=True):
                    known[index] = count
                return term.bounded(total_of(counts))
        except Exception:  # calls for one micro-batch may not do for another: its count is assumed
            return None

    def _in_proportion(self, micro_batch: int, term: Term) -> float | Tensor:
        count, sizes = term.divisor, self._batch.sizes
        if self._shared_out:  # a number that is the same for all
            return float(sum(sizes))
        known = torch.where(count == 0, 1.0, count) if isinstance(count, Tensor) else count or 1.0
        return known * sum(sizes) / sizes[micro_batch]
