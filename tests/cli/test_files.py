"""The files that commands write: documents, the HTML page, and the files of other engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import CheckReport, Cluster, Plan, Profile, Trace, plan
from pipepart.cli.simulated import SimulatedSteps
from pipepart.reporting import BenchResult

Run = Callable[[str], Result]

# In order: later commands read what earlier ones have saved.
DOCUMENTS = {
    "profile models.py:whole --time-budget 0 --micro-batches 2,4 -o profile.json --json": Profile,
    "plan profile.json --devices 2 --schedule 1f1b --stages 2 -o plan.json --json": Plan,
    "bench models.py:whole --plan plan.json --steps 2 --trace trace.json -o bench.json --json": BenchResult,
    "replan plan.json --trace trace.json -o next.json --json": Plan,
    "simulate --schedule zb-v --schedule gpipe --devices 2 --micro-batches 4 -o step.json --json": SimulatedSteps,
    "check models.py:whole --plan plan.json --steps 1 -o check.json --json": CheckReport,
    "cluster --device 1GiB --device 2GiB@0.5 -o cluster.json --json": Cluster,
}


def test_what_json_prints_is_what_is_saved_and_reads_back(run: Run, directory: Path) -> None:
    for line, kind in DOCUMENTS.items():
        result = run(line)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["version"] == 2
        file = directory / line.partition("-o ")[2].partition(" ")[0]
        assert json.loads(file.read_text()) == document
        kind.load(file)


@pytest.fixture
def planned(measured: Profile, directory: Path) -> Plan:
    """Two plans and a trace of each; returns the first."""
    made = [
        plan(measured, Cluster.virtual(2), schedule=name, micro_batches=4, cut_before=["2"])
        for name in ("1f1b", "gpipe")
    ]
    for each, name in zip(made, ("one", "two"), strict=True):
        each.save(directory / f"{name}.json")
        Trace(each, [each.simulate()]).save(directory / f"{name}.trace.json")
    return made[0]


@pytest.mark.parametrize(
    ("files", "shows"),
    [
        ("one.json", ["predicted"]),
        ("one.json --trace one.trace.json", ["Timeline, measured"]),
        (
            "one.json two.json --trace one.trace.json --trace two.trace.json",
            ["<h1>one and two</h1>", "Timeline, two: measured"],
        ),
        (
            "one.json one.json --trace one.trace.json --trace later.json",
            ["<h1>one.trace and later</h1>"],
        ),
    ],
)
def test_the_report_of_plans_and_traces(
    run: Run, planned: Plan, directory: Path, files: str, shows: list[str]
) -> None:
    (directory / "later.json").write_bytes((directory / "one.trace.json").read_bytes())
    done = run(f"report {files}")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "Saved in report.html.\n")
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in shows)


def test_the_files_of_other_engines_are_printed_or_saved_in_a_new_folder(
    run: Run, planned: Plan, directory: Path
) -> None:
    assert run("export one.json --to torch-pipelining").stdout == str(planned.export("torch-pipelining"))
    result = run("export one.json --to torch-pipelining -o out/deep")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "Saved in out/deep/torch_stages.py" in result.stderr
    saved = (directory / "out" / "deep" / "torch_stages.py").read_text()
    assert saved == planned.export("torch-pipelining").files["torch_stages.py"]
