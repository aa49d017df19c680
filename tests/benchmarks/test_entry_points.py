"""Every benchmark starts, refuses wrong options at once, and its quick run ends with a table."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from benchmarks.proof import TOLERANCE

NAMES = ("cpu", "emulated", "gpu", "planning", "published_layouts", "schedules", "split_backward", "tracing")


def run(name: str, *options: str, status: int = 0) -> Result:
    app = typer.Typer()
    app.command()(importlib.import_module(f"benchmarks.{name}").main)
    ended = CliRunner().invoke(app, list(options), catch_exceptions=False)
    assert ended.exit_code == status, ended.output
    return ended


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_explains_itself(name: str) -> None:
    assert "--help" in run(name, "--help").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends() -> None:
    said = run("gpu", status=1).output.splitlines()
    assert said == ["benchmarks.gpu needs a CUDA device, and torch finds none here."]


QUICK = {
    "emulated": ("--model tiny --micro-batches 4 --rounds 1", "played"),
    "schedules": ("--quick", "search"),
    "split_backward": ("--quick", "quartiles"),
    "tracing": ("--models tiny --rounds 2", "untraced"),
    "planning": ("--quick", "nasnet"),
    "published_layouts": ("--quick", "39.1 B"),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_ends_with_a_table(name: str) -> None:
    options, heading = QUICK[name]
    assert heading in run(name, *options.split()).output


@pytest.mark.slow
@pytest.mark.alone
def test_a_dry_run_of_the_gpu_benchmark_proves_times_watches_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run("gpu", "--device", "cpu", "--tiny", "--rounds", "1", "--stages", "2,4", "--json", str(file))
    report = json.loads(file.read_text())
    names = ["plain, micro-batches", "2 stages", "4 stages"]
    assert list(report["gpt"]["seconds"]) == names
    assert report["gpt"]["gradient_errors"].keys() == set(names[1:])
    assert report["gpt"]["overlap"]["2 stages"]["lanes"] >= 2
    assert report["gpt"]["planned_and_peak_bytes"]["2 stages"][0]["cpu"] > 0
    assert list(report["small"]["seconds"]) == ["plain, micro-batches", "2 stages"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_race_times_every_framework_on_proven_gradients(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shown = run(
        "cpu",
        *["--models", "tiny", "--micro-batches", "4", "--rounds", "1", "--tries", "1"],
        "--json",
        str(file),
    ).output
    race, overhead = json.loads(file.read_text())["races"]
    own = {f"pipepart {name}" for name in ("gpipe", "1f1b", "auto")}
    peers = {"torchgpipe", "torchgpipe, 2 workers", "torch.distributed gpipe", "torch.distributed 1f1b"}
    pipelines = own | {f"{name}, 2 ranks" for name in own} | peers
    assert race["gradient_errors"].keys() == pipelines
    assert max(race["gradient_errors"].values()) <= TOLERANCE
    steps = {name: len(samples["steps"]) for name, samples in race["samples"].items()}
    assert steps == dict.fromkeys({"plain", "plain, micro-batches"} | pipelines, 2)
    assert {name: len(seconds) for name, seconds in race["predicted_seconds"].items()} == dict.fromkeys(
        own, 1
    )
    assert overhead["micro_batches"] == 64
    for heading in ("tiny, 4 micro-batches", "µs per action"):
        assert heading in shown
