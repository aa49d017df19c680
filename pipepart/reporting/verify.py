"""Table of a check's results, with the first layer that differs and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.text import Text

from ..units import counted
from ..verify import CheckReport, CheckRow
from .kit.quantity import NONE
from .kit.table import Column, FittingTable


def check_table(report: CheckReport) -> Group:
    """Make a table with one row per schedule and dtype: bit for bit, or the largest relative error."""
    rows = report.rows
    columns = [
        Column("schedule", [row.schedule for row in rows], text=True),
        Column("stages", [str(row.stages) for row in rows], rank=2),
        Column("dtype", [row.dtype for row in rows], text=True),
    ]
    if any(row.recompute != "never" for row in rows):
        columns.append(Column("recompute", [row.recompute for row in rows], text=True))
    columns += [
        Column("losses", [_same(row.losses) for row in rows]),
        Column("gradients", [_same(row.gradients) for row in rows]),
        Column("parameters", [_same(row.parameters) for row in rows]),
        Column("buffers", [_same(row.buffers) for row in rows], rank=1),
        Column("whole\nmini-batch", [_error(row.mini_batch) for row in rows]),
        Column("", [_verdict(row) for row in rows], name="verdict", text=True),
    ]
    steps = f"{report.steps} step{'s' if report.steps != 1 else ''} of {report.optimizer}"
    table = FittingTable(
        f"Check of {report.model}: {steps}, {report.samples} samples in "
        f"{counted(report.micro_batches, 'micro-batch', 'es')}, "
        f"{len(report.devices)} devices",
        columns,
        notes=[
            "Against the plain model run on the same micro-batches in order; whole mini-batch: losses and gradients "
            "against one loss over all samples. Numbers are the largest relative error of any step, of which "
            f"{_allowed(rows)} is allowed.",
            *_plain(report),
        ],
    )
    return Group(table, *(Text(line) for line in _differences(rows)), Text(_summary(report), style="bold"))


def _same(error: float | None) -> str:
    return "bit for bit" if error == 0 else _error(error)


def _error(error: float | None) -> str:
    return NONE if error is None else "0" if error == 0 else f"{error:.0e}"


def _allowed(rows: Sequence[CheckRow]) -> str:
    return ", ".join(dict.fromkeys(f"{row.tolerance:.0e} in {row.dtype}" for row in rows))


def _verdict(row: CheckRow) -> str:
    return "same" if row.ok else "differs"


def _differences(rows: Sequence[CheckRow]) -> Iterator[str]:
    for row in rows:
        if row.layer:
            yield f"{'Rounding' if row.ok else 'Differs'}: {row.text}."


def _plain(report: CheckReport) -> Iterator[str]:
    """Notes on the plain model, each once for all dtypes."""
    return iter(dict.fromkeys(note for facts in report.plain for note in facts.notes))


def _summary(report: CheckReport) -> str:
    wrong = sum(not row.ok for row in report.rows)
    if wrong:
        return f"{wrong} of {len(report.rows)} differ from the plain model."
    same, rows = sum(row.same for row in report.rows), len(report.rows)
    which = f"All {same}" if same == rows else f"{same} of {rows}"
    rest = "" if same == rows else ", the others up to rounding"
    return f"{which} are bit for bit those of the plain model in the same micro-batches{rest}."
