"""Why numbers may differ, in words: from the layer that differs first, and from what is known of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..capture import describe
from ..loss import Reduction, declared_reduction
from ..planning import Plan
from .culprit import Culprit, Part
from .plans import summing_order
from .report import PlainFacts

_SHARED_STATE = (
    "what it keeps between calls is shared by micro-batches in flight, or is not safe on several threads"
)

_ONE_PART = "one part of the gradient is"


def why_different(
    culprit: Culprit, plan: Plan, micro_batches: int, model: nn.Module, facts: PlainFacts
) -> str:
    """Of numbers that differ from those of the same micro-batches."""
    if not facts.repeats:
        return _unsteady(facts)
    named = [name for name in facts.remembers if name.startswith(f"{culprit.layer}.")]
    again = any(stage.recompute != "never" for stage in plan.stages)
    if named and again:
        return f"it keeps {', '.join(named)} in Python, and its forward runs twice: recompute='never' runs it once"
    if (copies := plan.build_schedule(micro_batches).replicas) > 1:
        return f"order of sums: each of {copies} copies of the model adds up the gradients of its own micro-batches"
    order = summing_order(plan, micro_batches)
    if culprit.part is Part.GRADIENTS and order != sorted(order):
        shown = ", ".join(map(str, order))
        return f"order of sums: {plan.schedule} adds up the gradients of micro-batches in the order {shown}"
    if len({device.threads for device in plan.devices}) > 1:
        return "the devices have different numbers of intra-operation threads, which sum in different orders"
    if culprit.part is Part.LOSS:
        return "the outputs are the same: it draws random numbers, keeps state, or is summed in another order"
    if culprit.part in (Part.FORWARD, Part.BUFFERS, Part.BACKWARD):
        kept = f", or {', '.join(named)}" if named else ""
        return f"it gets the same and gives something else: {_SHARED_STATE}{kept}"
    if partners := _sharing(model, culprit.layer):
        return (
            f"it shares parameters with {_listed(partners)}: {_ONE_PART} missing or summed in another order"
        )
    if culprit.part is Part.GRADIENTS:
        return f"what reaches it is the same: {_ONE_PART} lost, doubled or summed in another order"
    return "the gradients are the same: something beside the optimizer writes its parameters"


def why_other_loss(loss_fn: Any, reduction: str | None) -> str:
    """Of numbers that are those of the same micro-batches, but not those of the whole mini-batch."""
    taken = reduction or declared_reduction(loss_fn) or (Reduction.MEAN if loss_fn is None else None)
    how = f"as a {taken} over samples" if taken else "as they were found out"
    return (
        f"the losses of the micro-batches, weighted {how}, do not make up the loss of the mini-batch: "
        "tell how it sums up its samples with reduction='mean' or 'sum', or write it as one of both"
    )


def plain_notes(facts: PlainFacts) -> list[str]:
    """What a reader has to know of the plain model to read the rows of this dtype."""
    notes = []
    if not facts.repeats:
        notes.append(f"Two plain runs differ: {_unsteady(facts)}.")
    if facts.draws:
        notes.append(
            f"Random layers ({_listed(facts.draws)}): the plain model was given the pipeline's draws, by seed, step, "
            "micro-batch and layer. By itself it draws other numbers."
        )
    remembers = any(name.startswith(f"{facts.mixes}.") for name in facts.remembers)
    if facts.mixes and facts.mixes not in facts.draws and not remembers:
        notes.append(
            f"With the mini-batch at once the plain model gives other numbers ({facts.at_once:.0e}): layer "
            f"{facts.mixes!r} computes with the samples beside each sample, and sees one micro-batch at a time, as in "
            "any training in micro-batches."
        )
    if facts.remembers:
        notes.append(f"Kept in Python, and changed by a step: {_listed(facts.remembers)}.")
    return notes


def _unsteady(facts: PlainFacts) -> str:
    where = f"layer {facts.unsteady!r}" if facts.unsteady else "the model"
    return (
        f"two plain runs from the same state and seed differ as well, first in {where}: an operation that is not "
        "deterministic, or state that is kept outside of the model"
    )


def _sharing(model: nn.Module, layer: str) -> list[str]:
    """The layers that share a parameter or buffer with one."""
    infos = describe(model)
    shared = {info.name: set(info.shares_with) for info in infos}
    return [
        info.name
        for info in infos
        if info.name != layer and (info.name in shared.get(layer, set()) or layer in info.shares_with)
    ]


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
