"""InfeasiblePlanError: why no plan fits, and what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...units import counted, format_bytes

if TYPE_CHECKING:
    from ..plan_document import Plan
    from ..stage_plan import StagePlan
    from .suggestions import Suggestion


@dataclass(frozen=True)
class Infeasible:
    """Why one candidate has no plan.

    Attributes:
        text: in words.
        draft: the plan that comes nearest, None where no cut is possible.
        stage: the stage of it that is short.
        deficit_bytes: what its device lacks; 0 where no memory would do.
    """

    text: str
    draft: Plan | None
    stage: int
    deficit_bytes: int


def explain_infeasible(draft: Plan, *, proven: bool) -> Infeasible:
    """Says which device of a plan lacks most, and what it needs it for.

    Args:
        draft: the plan that comes nearest to fitting.
        proven: whether no cut of its layers comes nearer.
    """
    needs = draft.device_bytes()
    limits = {name: draft.cluster.device(name).memory_bytes for name in needs}
    lacks = {name: need - limit for name, need in needs.items() if (limit := limits[name]) is not None}
    name = max(lacks, key=lambda name: lacks[name])
    own = {
        index % len(draft.stages): stage
        for index, stage in enumerate(draft.all_stages)
        if stage.device == name
    }
    need, limit, short = needs[name], needs[name] - lacks[name], lacks[name]
    static = sum(stage.static_bytes for stage in own.values())
    transient = max(stage.transient_bytes for stage in own.values())
    others = [
        f"{other} by {counted(lack, 'byte')}" for other, lack in lacks.items() if lack > 0 and other != name
    ]
    return Infeasible(
        f"with {counted(len(draft.stages), 'stage')}, {counted(draft.micro_batches, 'micro-batch', 'es')} and schedule "
        f"{draft.schedule!r}, {_where(name, own)} is short by {counted(short, 'byte')} "
        f"{'at best' if proven else 'in the best cut found'}: it needs {need} ({format_bytes(need)}: "
        f"{format_bytes(static)} of parameters, gradients and optimizer state, "
        f"{format_bytes(need - static - transient)} kept for {_backwards(list(own.values()))}, "
        f"{format_bytes(transient)} for a while) and has {limit} ({format_bytes(limit)})"
        + (f"; also short: {', '.join(others)}" if others else ""),
        draft,
        max(own, key=lambda index: own[index].memory_bytes),
        short,
    )


def _where(device: str, stages: Mapping[int, StagePlan]) -> str:
    spans = [f"{index} ({_span(stage.layers)})" for index, stage in stages.items()]
    return (
        f"stage {spans[0]} on {device}" if len(spans) == 1 else f"{device} with stages {' and '.join(spans)}"
    )


def _span(layers: Sequence[str]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _backwards(stages: Sequence[StagePlan]) -> str:
    again = {stage.recompute for stage in stages} - {"never"}
    suffix = "".join(f" (forwards run again, {mode!r})" for mode in sorted(again))
    if len(stages) > 1:
        return f"their backwards{suffix}"
    return f"the backward of {counted(stages[0].in_flight, 'micro-batch', 'es')}{suffix}"


class InfeasiblePlanError(ValueError):
    """No cut of the model fits the devices.

    Attributes:
        stage: the stage that is short in the best cut there is.
        deficit_bytes: bytes that its device lacks.
        suggestions: changes that would make it fit, each planned and found to fit, the cheapest first.
    """

    def __init__(
        self, message: str, stage: int, deficit_bytes: int, suggestions: Sequence[Suggestion] = ()
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.deficit_bytes = deficit_bytes
        self.suggestions = tuple(suggestions)
