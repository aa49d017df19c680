"""The part of one micro-batch in the loss of its mini-batch, where the loss is a sum of known means and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Kind, Played, Record, Term


def part(
    call: Callable[[Any], Any], output: Any, own: Record, whole: Record, parts: int
) -> tuple[Any, float]:
    """What the loss gives for a micro-batch, and the weight at which it counts.

    Where all terms weigh the same, the loss is called as it is. Else each mean and constant in it is given its own
    weight while it runs, and the weight of the result is 1.

    Args:
        call: the loss, called with the output.
        output: of the micro-batch.
        own, whole: what was seen of the loss for the micro-batch and the mini-batch; they agree.
        parts: micro-batches.

    Raises:
        Diverged: the loss makes other calls than were seen.
    """
    factors = [_factor(term.kind, term.count, total.count, parts) for term, total in _pairs(own, whole)]
    stays = any(term.sum_may_stay and not term.count and total.count for term, total in _pairs(own, whole))
    if not own.replaced and not stays and len(set(factors)) == 1:
        return call(output), factors[0]
    scales = {
        term.leaf: factor for term, factor in zip(own.terms, factors, strict=True) if term.kind is Kind.OWN
    }
    output = _scaled(output, scales)
    with Played(own, whole, factors):
        return call(output), 1.0


def _pairs(own: Record, whole: Record) -> Iterator[tuple[Term, Term]]:
    return zip(own.terms, whole.terms, strict=True)


def _factor(kind: Kind, count: float, total: float, parts: int) -> float:
    if kind is Kind.SUM:
        return 1.0
    return count / total if total else 1 / parts


def _scaled(output: Any, scales: dict[int, float]) -> Any:
    """The output with some of its tensors multiplied."""
    if not scales:
        return output
    place = -1

    def scale(tensor: Tensor) -> Tensor:
        nonlocal place
        place += 1
        return tensor * scales[place] if place in scales else tensor

    return pytree.tree_map_only(Tensor, scale, output)
