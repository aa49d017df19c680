"""The other commands: what they print, the files that they write, and those that other commands read again."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import CheckReport, Cluster, Plan, Profile, Roofline, Trace, plan
from pipepart.cli.simulated import SimulatedSteps
from pipepart.reporting import BenchResult

Run = Callable[..., Result]
SPEED = "--roofline cpu:50GFLOP/s,10GB/s,10us"


def test_json_alone_stands_on_standard_output_and_in_the_file(run: Run) -> None:
    options = "--micro-batches 3,2 --optimizer sgd --threads 1 --json -o profile.json"
    result = run(f"profile models:whole --time-budget 0 {options}")  # a module of the current directory
    found = Profile.model_validate_json(result.stdout)
    assert found == Profile.load("profile.json")
    assert [costs.micro_batches for costs in found.costs] == [2, 3]
    assert (found.optimizer, found.threads) == ("sgd", 1)
    assert "imported\nmade\n" in result.stderr
    assert "Saved in profile.json" in result.stderr


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("", ["embed", "blocks.0", "blocks.1"]),
        ("--layers embed,blocks.0.0", ["embed", "blocks.0.0", "blocks.0.1", "blocks.1"]),
        ("--layers ''", ["Tagger"]),
    ],
)
def test_modules_that_become_layers_are_named(run: Run, layers: str, names: list[str]) -> None:
    result = run(f"profile models.py:recorded --time-budget 0 --json {layers}")
    assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == names


def test_a_sample_can_be_made_up_and_a_missing_loss_is_mentioned(run: Run) -> None:
    result = run("profile models.py:tokens --input 6x3:int64:50 --time-budget 0 --json")
    assert json.loads(result.stdout)["inputs"] == [{"shape": [6, 3], "dtype": "int64"}]
    assert "Note: no loss function" in result.stderr
    run(f"profile models.py:instance --input 4x8 {SPEED}")


def test_an_import_that_fails_inside_the_users_file_is_not_taken_for_a_missing_file(run: Run) -> None:
    Path("needy.py").write_text("import not_installed_here\n")
    for place in ("needy.py", "needy"):
        error = run(f"profile {place}:f", 1).exception
        assert error is not None
        assert "needy.py" in "".join(traceback.format_exception(error))


def test_times_are_estimated_without_running_and_plans_of_estimates_are_explained_and_checked(
    run: Run,
) -> None:
    result = run(f"profile models.py:on_meta {SPEED}")
    words = " ".join(result.stdout.split())
    assert "estimated forward and backward" in words
    assert "Times are estimates for cpu: 50 GFLOP/s, 10 GB/s, 10 us;" in words
    assert "±" not in words
    assert "nothing was measured" in result.stderr
    Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 10 us").save("speed.json")
    run("plan models.py:whole --roofline speed.json --devices 2 --micro-batches 2 -o plan.json")
    assert "estimated for cpu" in run("explain plan.json").stdout
    run("simulate plan.json")
    run("check models.py:whole --plan plan.json")


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


def test_what_json_prints_is_what_is_saved_and_reads_back(run: Run) -> None:
    found = {}
    for line, kind in DOCUMENTS.items():
        printed = run(line).stdout
        document = json.loads(printed)
        assert document["version"] == 2
        file = Path(line.partition("-o ")[2].partition(" ")[0])
        assert json.loads(file.read_text()) == document
        found[file.stem] = kind.load(file)
        assert kind.model_validate_json(printed) == found[file.stem]
    bench, before, replanned = (found[name] for name in ("bench", "plan", "next"))
    assert (bench.model, bench.samples, bench.steps) == ("Sequential", 12, 2)
    assert replanned.schedule == "1f1b"
    assert replanned.profile.costs[0].layers != before.profile.costs[0].layers


def test_bench_profiles_and_plans_without_a_plan(run: Run) -> None:
    shown = run("bench models.py:recorded --devices 2 --schedule gpipe --micro-batches 3 --steps 1").stdout
    assert re.search(r"pipeline on \d devices?, gpipe", shown)  # of so small a model one may be the fastest
    assert "plain on virtual:0, 3 micro-batches" in shown
    assert "What limits the step" in shown


FAULTY = """
import torch
from torch import nn
from tests.verify.faults import forward_of_main_thread


def threads():
    model = nn.Sequential(nn.Linear(8, 8), forward_of_main_thread(1.0), nn.Linear(8, 4))
    return model, torch.randn(12, 8), torch.randn(12, 4), nn.MSELoss()
"""


def test_a_check_ends_with_status_0_or_with_status_1_and_names_the_layer(run: Run) -> None:
    shown = run("check models.py:whole --steps 1").stdout
    assert "Check of Sequential: 1 step of sgd, 12 samples in 4 micro-batches, 2 devices" in shown
    assert "All 6 are bit for bit those of the plain model in the same micro-batches." in shown
    Path("faulty.py").write_text(FAULTY)
    shown = run("check faulty.py:threads --schedule gpipe --steps 1 --dtype own", 1).stdout
    assert "Differs: gpipe in float32: layer '1' (Calls) is the first to differ" in shown
    assert "1 of 1 differ from the plain model." in shown


def test_options_reach_the_check(run: Run) -> None:
    options = "--schedule zb-v --devices 1 --micro-batches 3 --steps 2 --dtype bfloat16 --recompute always"
    printed = run(f"check models.py:whole {options} --tolerance 0.5 --json", None).stdout
    report = CheckReport.model_validate_json(printed)
    (row,) = report.rows
    assert (row.schedule, row.stages, row.dtype, row.recompute) == ("zb-v", 2, "bfloat16", "always")
    assert (report.micro_batches, report.steps, row.tolerance) == (3, 2, 0.5)


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
        ("one.json one.json --trace one.trace.json --trace later.json", ["<h1>one.trace and later</h1>"]),
    ],
)
def test_the_report_of_plans_and_traces(run: Run, planned: Plan, files: str, shows: list[str]) -> None:
    Path("later.json").write_bytes(Path("one.trace.json").read_bytes())
    done = run(f"report {files}")
    assert (done.stdout, done.stderr) == ("", "Saved in report.html.\n")
    page = Path("report.html").read_text(encoding="utf-8")
    assert all(text in page for text in shows)


def test_the_files_of_other_engines_are_printed_or_saved_in_a_new_folder(run: Run, planned: Plan) -> None:
    exported = planned.export("torch-pipelining")
    assert run("export one.json --to torch-pipelining").stdout == str(exported)
    result = run("export one.json --to torch-pipelining -o out/deep")
    assert result.stdout == ""
    assert "Saved in out/deep/torch_stages.py" in result.stderr
    assert Path("out/deep/torch_stages.py").read_text() == exported.files["torch_stages.py"]
