"""The result of ``pipepart bench`` and its table: step times of a plain model and of its pipeline."""

from __future__ import annotations

from ..document import Document, Seconds
from ..planning import Plan
from ..units import counted
from .quantity import NONE, TimeUnit
from .table import Column, FittingTable


class BenchResult(Document):
    """Measured steps: forward and backward of the same mini-batch, medians in seconds.

    Attributes:
        model: class of the model.
        samples: of the mini-batch.
        steps: measured, of each kind.
        device: that the plain model ran on.
        plain_seconds: of the plain model on one device, the mini-batch as a whole; null if that does not fit.
        micro_batched_seconds: the same in the plan's micro-batches; null likewise.
        pipeline_seconds: of the pipeline.
        predicted_plain_seconds: that the plan predicts for its micro-batches on one device; null for a plan by hand.
        predicted_seconds: that the plan predicts for the pipeline; null likewise.
        speed_up: plain_seconds / pipeline_seconds; null if the mini-batch did not fit one device.
        micro_batched_speed_up: micro_batched_seconds / pipeline_seconds; null likewise.
        predicted_speed_up: predicted_plain_seconds / predicted_seconds, to be held against the one before.
        plan: that was run.
    """

    model: str
    samples: int
    steps: int
    device: str
    plain_seconds: Seconds | None
    micro_batched_seconds: Seconds | None
    pipeline_seconds: Seconds
    predicted_plain_seconds: Seconds | None
    predicted_seconds: Seconds | None
    speed_up: float | None
    micro_batched_speed_up: float | None
    predicted_speed_up: float | None
    plan: Plan


def bench_table(result: BenchResult) -> FittingTable:
    """Make a table with one row for each way to train: measured and predicted step, samples a second, speed-up."""
    names = [
        f"plain on {result.device}",
        f"plain on {result.device}, {result.plan.micro_batches} micro-batches",
        f"pipeline on {counted(len(result.plan.workers), 'device')}, {result.plan.schedule}",
    ]
    measured = [result.plain_seconds, result.micro_batched_seconds, result.pipeline_seconds]
    predicted = [None, result.predicted_plain_seconds, result.predicted_seconds]
    if result.plan.micro_batches == 1:
        del names[1], measured[1], predicted[0]
    unit = TimeUnit.for_all(seconds for seconds in (*measured, *predicted) if seconds)

    def times(seconds: float | None) -> str:
        return unit.text(seconds) if seconds else NONE

    def against(seconds: float | None, own: float | None) -> str:
        return f"{seconds / own:.2f}" if seconds and own else NONE

    rates = [f"{result.samples / seconds:,.0f}" if seconds else NONE for seconds in measured]
    pairs = list(zip(measured, predicted, strict=True))
    notes = [
        f"Median of {counted(result.steps, 'step')} of {counted(result.samples, 'sample')}, forward and backward. "
        "Speed-up: of the pipeline.",
    ]
    if result.plain_seconds is None:
        notes.append(f"The mini-batch as a whole does not fit {result.device} without a pipeline.")
    return FittingTable(
        f"Training {result.model}",
        [
            Column("", names, text=True),
            Column(f"measured\n{unit.name}", list(map(times, measured))),
            Column(f"predicted\n{unit.name}", list(map(times, predicted))),
            Column(
                "off by",
                [f"{own / other - 1:+.0%}" if own and other else NONE for own, other in pairs],
                rank=2,
            ),
            Column("samples\nper second", rates, rank=1),
            Column("speed-up\nmeasured", [*(against(each, measured[-1]) for each in measured[:-1]), ""]),
            Column("speed-up\npredicted", [*(against(each, predicted[-1]) for each in predicted[:-1]), ""]),
        ],
        notes=notes,
    )
