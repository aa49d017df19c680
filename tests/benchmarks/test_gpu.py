"""The GPU benchmark on a machine without a GPU: prints one line, or makes a dry run of everything but CUDA."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu import main

app = typer.Typer()
app.command()(main)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends():
    ended = CliRunner().invoke(app, [])
    assert ended.exit_code == 1
    assert ended.output.splitlines() == ["benchmarks.gpu needs a CUDA device, and torch finds none here."]


@pytest.mark.slow
@pytest.mark.alone
def test_a_dry_run_proves_times_watches_and_reports(tmp_path: Path):
    file = tmp_path / "report.json"
    options = ["--device", "cpu", "--tiny", "--rounds", "1", "--stages", "2,4", "--json", str(file)]
    ended = CliRunner().invoke(app, options, catch_exceptions=False)
    assert ended.exit_code == 0
    report = json.loads(file.read_text())
    names = ["plain, micro-batches", "2 stages", "4 stages"]
    assert list(report["gpt"]["seconds"]) == names
    assert report["gpt"]["gradient_errors"].keys() == set(names[1:])
    assert report["gpt"]["overlap"]["2 stages"]["lanes"] >= 2
    assert report["gpt"]["planned_and_peak_bytes"]["2 stages"][0]["cpu"] > 0
    assert list(report["small"]["seconds"]) == ["plain, micro-batches", "2 stages"]
