"""``pipepart report``: one HTML page of one plan or two, with traces or without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Cluster, Profile, Trace, plan

Run = Callable[[str], Result]


@pytest.fixture
def planned(measured: Profile, directory: Path) -> None:
    """Two plans and a trace of each."""
    for name, schedule in (("one", "1f1b"), ("two", "gpipe")):
        made = plan(measured, Cluster.virtual(2), schedule=schedule)
        made.save(directory / f"{name}.json")
        Trace(made, [made.simulate()]).save(directory / f"{name}.trace.json")


def test_the_page_is_written_to_report_html_or_where_told(planned: None, run: Run, directory: Path):
    done = run("report one.json")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "Saved in report.html.\n")
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "predicted" in page
    assert run("report one.json -o other.html").exit_code == 0
    assert (directory / "other.html").read_text(encoding="utf-8") == page


def test_a_trace_adds_the_measured_step(planned: None, run: Run, directory: Path):
    assert run("report one.json --trace one.trace.json").exit_code == 0
    assert "Timeline, measured" in (directory / "report.html").read_text(encoding="utf-8")


def test_two_plans_go_by_the_names_of_their_files(planned: None, run: Run, directory: Path):
    assert run("report one.json two.json --trace one.trace.json --trace two.trace.json").exit_code == 0
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "<h1>one and two</h1>" in page
    assert "Timeline, two: measured" in page


def test_two_runs_of_a_plan_go_by_the_names_of_their_traces(planned: None, run: Run, directory: Path):
    (directory / "later.json").write_bytes((directory / "one.trace.json").read_bytes())
    assert run("report one.json one.json --trace one.trace.json --trace later.json").exit_code == 0
    assert "<h1>one.trace and later</h1>" in (directory / "report.html").read_text(encoding="utf-8")
