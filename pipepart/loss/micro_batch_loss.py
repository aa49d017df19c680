"""The loss of one micro-batch, and a pattern that gives those of further ones without following the loss again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from .terms import Count, Replay, Term, Terms, without_slack


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
        for tensor, coefficient, divisor, divided in self.sum.terms:
            # The loss is often its only term.
            leaf = value.detach() if tensor is self.value else without_slack(tensor.detach())
            count = divisor and Count(divisor.value)
            terms.append(Term(leaf.requires_grad_(tensor.requires_grad), coefficient, count, divided))
        return MicroBatchLoss(value, Terms(tuple(terms), self.sum.shift), self.key)

    def on_host(self) -> MicroBatchLoss:
        """Return the same in the memory of the host, for other processes."""
        terms = tuple(
            Term(
                without_slack(term.tensor.detach().cpu()).requires_grad_(term.tensor.requires_grad),
                _cpu(term.coefficient),
                term.divisor and Count(_cpu(term.divisor.value)),
                term.divided,
            )
            for term in self.sum.terms
        )
        # Without the key: keys are numbered in each process.
        return MicroBatchLoss(self.value.cpu(), Terms(terms, _cpu(self.sum.shift)))


class LossPattern(NamedTuple):
    """What one of torch's own losses is made of: one mean or sum, as found in one micro-batch of a step.

    In another micro-batch of the same shapes it is the same, except for the count of a mean. Following the call again
    would take longer than a small loss.

    Attributes:
        form: of the output and the target.
        key: as in :class:`MicroBatchLoss`.
        divided: of its only term.
        number: its count, or what gives that of each micro-batch; None for a sum.
    """

    form: Hashable
    key: Hashable
    divided: bool
    number: float | Replay | None

    @classmethod
    def of(cls, output: Any, target: Any, taken: MicroBatchLoss) -> LossPattern | None:
        """Return what a loss is by what it was in one micro-batch; None if others of its form may be different."""
        form, terms = form_of(output, target), taken.sum.terms
        if form is None or len(terms) != 1 or taken.sum.shift != 0.0:
            return None
        tensor, coefficient, divisor, divided = terms[0]
        if tensor is not taken.value or coefficient != 1.0:
            return None
        if divisor is None:
            return cls(form, taken.key, divided, None)
        value, replay = divisor
        if isinstance(value, Tensor):  # on an accelerator, where it is not waited for
            return None
        # Of class targets the values count, of others the shape.
        number = value if target.is_floating_point() else replay
        return cls(form, taken.key, divided, number) if number is not None else None

    def loss(self, value: Any, micro_batch: int) -> MicroBatchLoss | None:
        """Return a loss with what it is made of; None if it has to be followed."""
        divisor = None
        if self.number is not None:
            try:
                number = self.number(micro_batch) if callable(self.number) else self.number
            except Exception:  # class weights may be on another device than the targets
                return None
            if not number:  # the mean over nothing
                return None
            divisor = Count(number)
        return MicroBatchLoss(value, Terms((Term(value, 1.0, divisor, self.divided),)), self.key)


def form_of(output: Any, target: Any) -> Hashable:
    """Return the shapes and types of an output and a target; None if one of them is no plain tensor."""
    if type(output) is not Tensor or type(target) is not Tensor:
        return None
    return output.shape, output.dtype, output.device, output.requires_grad, target.shape, target.dtype


def _cpu(number: Any) -> Any:
    return number.cpu() if isinstance(number, Tensor) else number
