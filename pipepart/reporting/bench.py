"""The result of ``pipepart bench`` and its table: step times of a plain model and of its pipeline."""

from __future__ import annotations

from ..document import Document, Seconds
from ..planning import Plan
from ..units import counted
from .quantity import NONE, TimeUnit
from .table import Column, FittingTable, times


class BenchResult(Document):
    """Measured steps: forward and backward of the same mini-batch, medians in seconds.

    Attributes:
        model: class of the model.
        samples: of the mini-batch.
        steps: measured, of each kind.
        device: that the plain model ran on.
        plain_seconds: of the plain model on one device, the mini-batch as a whole; null if that does not fit.
        micro_batched_seconds: the same in the plan's micro-batches, for which it predicts
            ``plan.prediction.serial_seconds``; null likewise.
        pipeline_seconds: of the pipeline, for which the plan predicts ``plan.prediction.step_seconds``.
        plan: that was run.
    """

    model: str
    samples: int
    steps: int
    device: str
    plain_seconds: Seconds | None
    micro_batched_seconds: Seconds | None
    pipeline_seconds: Seconds
    plan: Plan


def bench_table(result: BenchResult) -> FittingTable:
    """Make a table with one row for each way to train: measured and predicted step, samples a second, speed-up."""
    plan, prediction = result.plan, result.plan.prediction
    rows = {
        f"plain on {result.device}": (result.plain_seconds, None),
        f"plain on {result.device}, {counted(plan.micro_batches, 'micro-batch', 'es')}": (
            result.micro_batched_seconds,
            prediction and prediction.serial_seconds,
        ),
        f"pipeline on {counted(len(plan.workers), 'device')}, {plan.schedule}": (
            result.pipeline_seconds,
            prediction and prediction.step_seconds,
        ),
    }
    measured, predicted = zip(*rows.values(), strict=True)
    unit = TimeUnit.for_all(seconds for seconds in (*measured, *predicted) if seconds)

    def ratios(seconds: tuple[float | None, ...]) -> list[str]:
        last = seconds[-1]
        return [*(f"{each / last:.2f}" if each and last else NONE for each in seconds[:-1]), ""]

    notes = [
        f"Median of {counted(result.steps, 'step')} of {counted(result.samples, 'sample')}, forward and backward. "
        "Speed-up: of the pipeline.",
    ]
    if result.plain_seconds is None:
        notes.append(f"The mini-batch as a whole does not fit {result.device} without a pipeline.")
    off = [
        f"{pipelined / other - 1:+.0%}" if pipelined and other else NONE for pipelined, other in rows.values()
    ]
    rates = [f"{result.samples / seconds:,.0f}" if seconds else NONE for seconds in measured]
    return FittingTable(
        f"Training {result.model}",
        [
            Column("", list(rows), text=True),
            times("measured", measured, unit),
            times("predicted", predicted, unit),
            Column("off by", off, rank=2),
            Column("samples\nper second", rates, rank=1),
            Column("speed-up\nmeasured", ratios(measured)),
            Column("speed-up\npredicted", ratios(predicted)),
        ],
        notes=notes,
    )
