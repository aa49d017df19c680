"""The loss of one micro-batch, and a pattern that gives those of further ones without following the loss again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import Unfinished
from .terms import Count, Term, Terms, without_slack


class MicroBatchLoss(NamedTuple):
    """The loss of one micro-batch.

    Attributes:
        value: what the loss function returned, for a report.
        sum: what it is made of. Gradients enter at the tensors of its terms.
        key: equal for micro-batches whose losses were computed alike.
    """

    value: Tensor
    sum: Terms
    key: Hashable = None

    @property
    def roots(self) -> list[Tensor]:
        """The tensors at which gradients enter."""
        return [term.tensor for term in self.sum.terms if term.tensor.requires_grad]

    def without_graph(self) -> MicroBatchLoss:
        """Return the same with leaves as tensors, which keep nothing alive for a backward.

        Without replays too, which hold the target of the micro-batch.
        """
        value = without_slack(self.value.detach())
        terms = []
        for tensor, coefficient, divisor, divided, _ in self.sum.terms:
            # The loss is often its only term.
            leaf = value.detach() if tensor is self.value else without_slack(tensor.detach())
            count = divisor and divisor._replace(replay=None)
            terms.append(Term(leaf.requires_grad_(tensor.requires_grad), coefficient, count, divided))
        return MicroBatchLoss(value, Terms(tuple(terms), self.sum.shift), self.key)

    def on_host(self) -> MicroBatchLoss:
        """Return the same in the memory of the host, for other processes."""
        terms = tuple(
            Term(
                without_slack(term.tensor.detach().cpu()).requires_grad_(term.tensor.requires_grad),
                _cpu(term.coefficient),
                term.divisor and term.divisor._replace(value=_cpu(term.divisor.value), replay=None),
                term.divided,
            )
            for term in self.sum.terms
        )
        # Without the key: keys are numbered in each process.
        return MicroBatchLoss(self.value.cpu(), Terms(terms, _cpu(self.sum.shift)))


class LossPattern(NamedTuple):
    """What a loss is made of, as found in one micro-batch of a step: one share of the mini-batch's loss.

    A micro-batch of the same shapes whose loss makes the same calls has the same pattern, so that it need not be
    followed, which takes longer than a small loss.

    Attributes:
        form: of the output and the target.
        key: as in :class:`MicroBatchLoss`.
        calls: that the loss made; empty for torch's own losses.
        divisor: what gives the count of a micro-batch; None for a sum.
        pair: whether the loss returns ``(sum, count)``.
    """

    form: Hashable
    key: Hashable
    calls: Sequence[Hashable]
    divisor: Count | None
    pair: bool

    @classmethod
    def of(
        cls, form: Hashable, taken: MicroBatchLoss, samples: Count, calls: Sequence[Hashable], pair: bool
    ) -> LossPattern | None:
        """Return what a loss is by what it was in one micro-batch; None if others of its form may be different.

        Args:
            form: of the micro-batch.
            taken: its loss.
            samples: their count.
            calls, pair: as the attributes.
        """
        terms = taken.sum.terms
        if form is None or not terms:
            return None
        if pair:
            return cls(form, taken.key, calls, None, True)
        if all(term.divisor is not None and term.divisor.in_proportion for term in terms):
            return cls(form, taken.key, calls, samples, False)
        first, *others = terms
        divisor = first.divisor
        if others or taken.sum.shift != 0.0 or isinstance(first.coefficient, Tensor):
            return None
        if divisor is not None and (divisor.replay is None or isinstance(divisor.value, Tensor)):
            return None  # on an accelerator a count is not waited for
        if (
            divisor is not None and divisor.replay is not None
        ):  # each micro-batch's own count is part of the total, too
            divisor = divisor._replace(replay=cache(divisor.replay))
        return cls(form, taken.key, calls, divisor, False)

    def loss(self, value: Tensor, micro_batch: int) -> MicroBatchLoss | None:
        """Return a loss with what it is made of; None if it has to be followed."""
        divisor = self.divisor
        if divisor is not None and divisor.replay is not None:
            try:
                number = divisor.replay(micro_batch)
            except Exception:  # class weights may be on another device than the targets
                return None
            if isinstance(number, Tensor) or not number or number < divisor.least:  # the mean over nothing
                return None
            divisor = divisor._replace(value=number)
        return MicroBatchLoss(value, Terms((Term(value, 1.0, divisor, divisor is not None),)), self.key)


def form_of(output: Any, target: Any) -> Hashable:
    """Return the shapes and types of an output and a target; None if they hold values that are not tensors."""
    if type(output) is Tensor and (target is None or type(target) is Tensor):
        return _form(output), target is None or _form(target)
    leaves, spec = pytree.tree_flatten((output, target))
    if not all(type(leaf) is Tensor for leaf in leaves if leaf is not None):
        return None
    kept = output.recording if isinstance(output, Unfinished) else None
    return kept, str(spec), *(leaf is None or _form(leaf) for leaf in leaves)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _cpu(number: Any) -> Any:
    return number.cpu() if isinstance(number, Tensor) else number
