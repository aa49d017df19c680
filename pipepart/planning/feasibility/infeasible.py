"""InfeasiblePlanError: why no plan fits, and which changes would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...cluster import Device
from ...units import counted, format_bytes
from ..plan_document import Plan
from ..stage_plan import StagePlan


@dataclass(frozen=True)
class Suggestion:
    """A change of the request that makes the model fit.

    Attributes:
        options: keywords of :func:`pipepart.plan` that change; None means the default.
        devices: devices to add to the cluster.
        estimated: True if the micro-batch size was not profiled, so that its costs are estimated: profile it first.
        plan: the plan that :func:`pipepart.plan` makes with the change.
    """

    options: Mapping[str, str | int | None]
    devices: tuple[Device, ...]
    estimated: bool
    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step with the change."""
        return self.plan.predicted.step_seconds

    @property
    def change(self) -> str:
        """The change in words."""
        if self.devices:
            like = self.devices[0].name.partition(" (added")[0]
            return f"{counted(len(self.devices), 'more device')} like {like}" + self._options_text(", with ")
        return self._options_text()

    def _options_text(self, before: str = "") -> str:
        texts = [f"{name}={value!r}" for name, value in self.options.items()]
        return before + ", ".join(texts) if texts else ""


@dataclass(frozen=True)
class Infeasible:
    """Why one candidate has no plan.

    Attributes:
        text: in words.
        stage: the stage that does not fit in the nearest cut.
        deficit_bytes: bytes that its device lacks; 0 if no memory would be enough.
    """

    text: str
    stage: int = 0
    deficit_bytes: int = 0


class InfeasiblePlanError(ValueError):
    """No cut of the model fits the devices.

    Attributes:
        reason: why, without the suggestions.
        stage: the stage that does not fit in the nearest cut.
        deficit_bytes: bytes that its device lacks.
        suggestions: changes that fit, each of them planned; the shortest step first, more devices last.
    """

    def __init__(
        self,
        message: str,
        reason: str,
        stage: int,
        deficit_bytes: int,
        suggestions: Sequence[Suggestion] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.stage = stage
        self.deficit_bytes = deficit_bytes
        self.suggestions = tuple(suggestions)


def explain_infeasible(nearest: Plan, *, proven: bool) -> Infeasible:
    """Explain which device lacks most memory, and what it needs it for.

    Args:
        nearest: the plan with the smallest deficit.
        proven: True if no cut of its layers has a smaller one.
    """
    needs = nearest.device_bytes()
    deficits = {
        name: need - limit
        for name, need in needs.items()
        if (limit := nearest.cluster.device(name).memory_bytes) is not None
    }
    name = max(deficits, key=lambda name: deficits[name])
    own = {
        index % len(nearest.stages): stage
        for index, stage in enumerate(nearest.all_stages)
        if stage.device == name
    }
    need, deficit = needs[name], deficits[name]
    static = sum(stage.static_bytes for stage in own.values())
    transient = max(stage.transient_bytes for stage in own.values())
    others = [
        f"{other} by {counted(lack, 'byte')}"
        for other, lack in deficits.items()
        if lack > 0 and other != name
    ]
    text = (
        f"with {counted(len(nearest.stages), 'stage')}, {counted(nearest.micro_batches, 'micro-batch', 'es')} and "
        f"schedule {nearest.schedule!r}, {_where(name, own)} is short by {counted(deficit, 'byte')} "
        f"{'at best' if proven else 'in the best cut found'}: it needs {need} ({format_bytes(need)}: "
        f"{format_bytes(static)} of parameters, gradients, optimizer state and buffers, "
        f"{format_bytes(need - static - transient)} kept for {_backwards(list(own.values()))}, "
        f"{format_bytes(transient)} of workspace) and has {need - deficit} ({format_bytes(need - deficit)})"
    )
    if others:
        text += f"; also short: {', '.join(others)}"
    return Infeasible(text, max(own, key=lambda index: own[index].memory_bytes), deficit)


def _where(device: str, stages: Mapping[int, StagePlan]) -> str:
    spans = [f"{index} ({_span(stage.layers)})" for index, stage in stages.items()]
    return (
        f"stage {spans[0]} on {device}" if len(spans) == 1 else f"{device} with stages {' and '.join(spans)}"
    )


def _span(layers: Sequence[str]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _backwards(stages: Sequence[StagePlan]) -> str:
    modes = sorted({stage.recompute for stage in stages} - {"never"})
    suffix = "".join(f" (recompute={mode!r})" for mode in modes)
    if len(stages) > 1:
        return f"their backwards{suffix}"
    return f"the backward of {counted(stages[0].in_flight, 'micro-batch', 'es')}{suffix}"
