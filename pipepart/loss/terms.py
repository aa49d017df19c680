"""The part of one micro-batch in the loss of its mini-batch, where the loss is a sum of known means and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Kind, Record
from .follow import Call, Followed, factor


def part(
    call: Callable[[Any], Any],
    output: Any,
    own: Record,
    whole: Record,
    parts: int,
    calls: list[Call] | None = None,
) -> tuple[Any, float, Followed]:
    """What the loss gives for a micro-batch, the weight at which it counts, and how it came to be.

    Where all terms weigh the same, it is the loss itself. Else each mean and constant in it is given its own weight
    while it runs, and the weight of the result is 1.

    Args:
        call: the loss, called with the output.
        output: of the micro-batch.
        own, whole: what was seen of the loss for the micro-batch and the mini-batch; they agree.
        parts: micro-batches.
        calls: where another micro-batch of this kind has been seen instead, the calls of its loss.

    Raises:
        Diverged: the loss makes other calls than were seen.
    """
    pairs = list(zip(own.terms, whole.terms, strict=True))
    factors = [factor(term.kind, term.count, total.count, parts) for term, total in pairs]
    if calls is None:
        stays = any(term.sum_may_stay and not term.count and total.count for term, total in pairs)
        alike = len(set(factors)) == 1 and not stays
    elif len(pairs) == 1:
        alike = pairs[0][0].kind is not Kind.CONSTANT and not pairs[0][0].sum_may_stay
    else:
        alike = len(set(factors)) == 1 and not whole.by_values
    if not alike:
        output = _scaled(output, own, factors)
    with Followed(own, whole, parts, scaled=not alike, calls=calls) as followed:
        value = call(output)
    followed.finish()
    return value, followed.weight, followed


def _scaled(output: Any, own: Record, factors: Sequence[float]) -> Any:
    """The output with the losses that the model made in it multiplied."""
    scales = {
        term.leaf: scale for term, scale in zip(own.terms, factors, strict=True) if term.kind is Kind.OWN
    }
    if not scales:
        return output
    place = -1

    def scale(tensor: Tensor) -> Tensor:
        nonlocal place
        place += 1
        return tensor * scales[place] if place in scales else tensor

    return pytree.tree_map_only(Tensor, scale, output)
