"""The loss of one micro-batch, and a pattern to compute further losses without tracing the loss function again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import Unfinished
from .terms import Count, Targets, Term, Terms, on_host, without_slack


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
        """The tensors from which the backward starts."""
        return [term.tensor for term in self.sum.terms if term.tensor.requires_grad]

    def without_graph(self) -> MicroBatchLoss:
        """Return a copy with detached tensors, which do not keep the graph alive.

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
        """Return a copy in host memory, to send to other processes."""
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
    """The structure of a loss that is the same for all micro-batches of equal shapes.

    Attributes:
        key: as in :class:`MicroBatchLoss`.
        divisor: what gives the count of a micro-batch; None for a sum.
        divided: whether it is a mean of torch's, which has no gradient where nothing counts.
        pair: whether the loss returns ``(sum, count)``.
        leaves: the tensors beside the model's parameters that get a gradient, by their identity.
    """

    key: Hashable
    divisor: Count | None
    divided: bool
    pair: bool
    leaves: Mapping[int, Tensor]

    @classmethod
    def of(
        cls, taken: MicroBatchLoss, samples: Count, pair: bool, leaves: Mapping[int, Tensor]
    ) -> LossPattern | None:
        """Return the pattern of a micro-batch's loss; None if its terms are too different for a pattern.

        Args:
            taken: the loss of the micro-batch.
            samples: their count.
            pair, leaves: as the attributes.
        """
        terms = taken.sum.terms
        if not terms:
            return None
        first, *others = terms
        divisor = first.divisor
        if pair:
            return cls(taken.key, divisor and divisor._replace(value=0.0), False, True, leaves)
        if all(term.divisor is not None and term.divisor.in_proportion for term in terms):
            return cls(taken.key, samples, True, False, leaves)
        if others or taken.sum.shift != 0.0 or isinstance(first.coefficient, Tensor):
            return None
        if divisor is None:
            return cls(taken.key, None, False, False, leaves)
        if divisor.replay is None or (isinstance(divisor.value, Tensor) and not first.divided):
            return None
        return cls(taken.key, divisor._replace(value=0.0), first.divided, False, leaves)

    def loss(self, value: Tensor, targets: Targets, micro_batch: int) -> MicroBatchLoss | None:
        """Return the loss of another micro-batch by this pattern; None if the loss function must be traced."""
        divisor = self.divisor
        if divisor is not None and divisor.replay is not None:
            try:
                number = divisor.replay(targets, micro_batch)
            except Exception:  # class weights may be on another device than the targets
                return None
            number = on_host(number) if isinstance(number, Tensor) else number
            if isinstance(number, Tensor):  # on a device, which is not waited for: it may be 0
                if not self.divided:
                    return None
            elif not number or number < divisor.least:  # the mean over nothing
                return None
            divisor = divisor._replace(value=number)
        return MicroBatchLoss(value, Terms((Term(value, 1.0, divisor, divisor is not None),)), self.key)


def form_of(output: Any, target: Any) -> Hashable:
    """Return the shapes and dtypes of an output and a target; None if they contain other values than tensors."""
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
