"""Runs the whole CPU benchmark on a tiny model, in a few seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import cpu
from benchmarks.proof import TOLERANCE


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=290,
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_race_times_every_framework_on_proven_gradients(tmp_path: Path):
    report_file = tmp_path / "report.json"
    shown = run("--models", "tiny", "--micro-batches", "4", "--rounds", "1", "--json", str(report_file))
    assert shown.returncode == 0, shown.stderr
    race, overhead = json.loads(report_file.read_text())["races"]
    pipelines = {
        "pipepart gpipe",
        "pipepart 1f1b",
        "pipepart auto",
        "torchgpipe",
        "torchgpipe, 2 workers",
        "pipepart gpipe, 2 ranks",
        "pipepart 1f1b, 2 ranks",
        "pipepart auto, 2 ranks",
        "torch.distributed gpipe",
        "torch.distributed 1f1b",
    }
    assert race["gradient_errors"].keys() == pipelines
    assert max(race["gradient_errors"].values()) <= TOLERANCE
    assert {name: len(samples["steps"]) for name, samples in race["samples"].items()} == dict.fromkeys(
        {"plain", "plain, micro-batches"} | pipelines, 2
    )
    assert {name: len(seconds) for name, seconds in race["predicted_seconds"].items()} == {
        "pipepart gpipe": 1,
        "pipepart 1f1b": 1,
        "pipepart auto": 1,
    }
    assert overhead["micro_batches"] == 64
    for heading in ("tiny, 4 micro-batches", "µs per action"):
        assert heading in shown.stdout


@pytest.mark.parametrize(
    ("options", "complaint"), [(["--models", "resnet"], "resnet"), (["--micro-batches", "4,x"], "4,x")]
)
def test_a_wrong_option_is_answered_before_anything_starts(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
):
    def started():
        raise AssertionError("the processes of the peers were started")

    monkeypatch.setattr(cpu, "Ranks", started)
    app = typer.Typer()
    app.command()(cpu.main)
    ended = CliRunner().invoke(app, options)
    assert ended.exit_code == 2, ended.output
    assert complaint in ended.stderr
