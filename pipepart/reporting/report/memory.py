"""The section of the report with the peak memory of each device, what it consists of, and the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...planning import Plan
from ...units import format_bytes
from ..plan_tables import memory_table, owned_stages
from ..quantity import size
from ..table import Column, FittingTable
from .bars import Bars, Part, bars
from .run import Run

_FAR = 3  # times the largest peak; a limit that is farther away is not drawn


class Memory(NamedTuple):
    """The memory of a plan's devices: bars on a scale of so many bytes, and the table behind them."""

    name: str
    scale: str
    bars: Bars
    table: FittingTable


def memory_section(runs: Sequence[Run]) -> list[Memory] | None:
    """Return the memory of each plan's devices; None if no plan has a prediction."""
    shown = [_memory(run) for run in runs if run.plan.prediction is not None and run.plan.profile is not None]
    return shown or None


def _memory(run: Run) -> Memory:
    plan = run.plan
    parts = _parts(plan)
    names = list(owned_stages(plan))
    limits = [plan.cluster.device(name).memory_bytes for name in names]
    measured = [run.trace.memory_bytes.get(name) if run.trace else None for name in names]
    peaks = [sum(values) for values in zip(*(part.values for part in parts), strict=True)]
    largest = max([*peaks, *(peak or 0 for peak in measured)])
    scale = 1.04 * max([largest, *(limit for limit in limits if limit and limit < _FAR * largest)])
    marks = [("limit", "limit", limits), ("measured peak", "measured", measured)]
    table = memory_table(plan)
    if any(measured):
        table = replace(table, columns=[*table.columns, Column("measured\npeak", list(map(size, measured)))])
    return Memory(run.name, format_bytes(scale), bars(names, parts, scale, format_bytes, marks), table)


def _parts(plan: Plan) -> list[Part]:
    """Return what each device in use has in its memory at its peak, as the plan predicts it."""
    needs, every = plan.device_bytes(), plan.all_stages
    owned = [(needs[device], [every[at] for at in numbers]) for device, numbers in owned_stages(plan).items()]

    def part(word: str, look: str, name: str) -> Part:
        return Part(word, look, [sum(getattr(stage, name) for stage in stages) for _, stages in owned])

    parameters = part("parameters", "static-0", "parameter_bytes")
    optimizer = part("optimizer", "static-2", "optimizer_bytes")
    buffers = part("buffers", "static-3", "buffer_bytes")
    static = part("", "", "static_bytes").values
    others = zip(static, parameters.values, optimizer.values, buffers.values, strict=True)
    gradients = [total - weights - state - other for total, weights, state, other in others]
    above = [need - fixed for (need, _), fixed in zip(owned, static, strict=True)]
    # Stages of further replicas have the workspace of the first one, which sums gradients.
    workspace = [
        min(max(stage.transient_bytes for stage in stages), rest)
        for (_, stages), rest in zip(owned, above, strict=True)
    ]
    kept = [rest - most for rest, most in zip(above, workspace, strict=True)]
    return [
        parameters,
        Part("gradients", "static-1", gradients),
        optimizer,
        buffers,
        Part("kept for backwards", "kept", kept),
        Part("workspace and messages", "workspace", workspace),
    ]
