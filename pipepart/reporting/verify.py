"""Table of a check's results, with the first layer that differs."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from ..units import counted
from ..verify import CheckReport, CheckRow
from .quantity import NONE
from .table import Column, FittingTable

_VERDICTS = {"same": "Rounding", "compressed": "Compressed", "differs": "Differs"}


def check_table(report: CheckReport) -> Group:
    """Make a table with one row per schedule and dtype: bit for bit, or the largest relative error."""
    rows = report.rows
    recompute = any(row.recompute != "never" for row in rows)
    columns = [
        Column("schedule", [row.schedule for row in rows], text=True),
        Column("stages", [str(row.stages) for row in rows], rank=5),
        Column("dtype", [row.dtype for row in rows], text=True),
        *([Column("recompute", [row.recompute for row in rows], text=True)] if recompute else []),
        Column("losses", [_same(row.losses) for row in rows], rank=1),
        Column("gradients", [_same(row.gradients) for row in rows]),
        Column("parameters", [_same(row.parameters) for row in rows], rank=2),
        Column("buffers", [_same(row.buffers) for row in rows], rank=4),
        Column("whole\nmini-batch", [_error(row.mini_batch) for row in rows], rank=3),
        Column("", [_verdict(row) for row in rows], name="verdict", text=True),
    ]
    allowed = ", ".join(dict.fromkeys(f"{row.tolerance:.0e} in {row.dtype}" for row in rows))
    plain = dict.fromkeys(note for facts in report.plain for note in facts.notes)
    table = FittingTable(
        f"Check of {report.model}: {counted(report.steps, 'step')} of {report.optimizer}, "
        f"{counted(report.samples, 'sample')} in {counted(report.micro_batches, 'micro-batch', 'es')}, "
        f"{counted(len(report.devices), 'device')}",
        columns,
        notes=[
            "Against the plain model run on the same micro-batches in order; whole mini-batch: losses and gradients "
            "against one loss over all samples. Numbers are the largest relative error of any step; allowed: "
            f"{allowed}.",
            *dict.fromkeys(f"The plan sends {row.compressed}." for row in rows if row.compressed),
            *plain,
        ],
    )
    differences = [Text(f"{_VERDICTS[_verdict(row)]}: {row.text}.") for row in rows if row.layer]
    return Group(table, *differences, Text(_summary(report), style="bold"))


def _verdict(row: CheckRow) -> str:
    if not row.ok:
        return "differs"
    return "compressed" if row.compressed and not row.same else "same"


def _same(error: float | None) -> str:
    return "bit for bit" if error == 0 else _error(error)


def _error(error: float | None) -> str:
    return NONE if error is None else "0" if error == 0 else f"{error:.0e}"


def _summary(report: CheckReport) -> str:
    rows = len(report.rows)
    if wrong := sum(not row.ok for row in report.rows):
        return f"{wrong} of {rows} differ from the plain model."
    same = sum(row.same for row in report.rows)
    up_to = "compression" if any(row.compressed for row in report.rows) else "rounding"
    which, rest = (
        (f"All {same}", "") if same == rows else (f"{same} of {rows}", f", the others up to {up_to}")
    )
    return f"{which} are bit for bit those of the plain model in the same micro-batches{rest}."
