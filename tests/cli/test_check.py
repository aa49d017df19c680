"""``pipepart check``: tables, JSON and exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import CheckReport

Run = Callable[[str], Result]


@pytest.fixture
def faulty(directory: Path) -> None:
    """A model in ``faulty.py`` with a layer that does something else on a worker's thread, and a loss that lies."""
    (directory / "faulty.py").write_text(
        """
import torch
from torch import nn
from tests.verify.faults import ForwardOfMainThread


def threads():
    model = nn.Sequential(nn.Linear(8, 8), ForwardOfMainThread(), nn.Linear(8, 4))
    return model, torch.randn(12, 8), torch.randn(12, 4), nn.MSELoss()
"""
    )


def test_a_model_that_is_right_ends_with_status_0_and_says_so(run: Run) -> None:
    result = run("check models.py:whole --steps 1")
    assert result.exit_code == 0, result.stderr
    assert "Check of Sequential: 1 step of sgd, 12 samples in 4 micro-batches, 2 devices" in result.stdout
    assert "All 6 are bit for bit those of the plain model in the same micro-batches." in result.stdout


def test_a_difference_ends_with_status_1_and_names_the_layer(run: Run, faulty: None) -> None:
    result = run("check faulty.py:threads --schedule gpipe --steps 1 --dtype own")
    assert result.exit_code == 1
    assert (
        "Differs: gpipe in float32: layer '1' (ForwardOfMainThread) is the first to differ" in result.stdout
    )
    assert "1 of 1 differ from the plain model." in result.stdout


def test_options_reach_the_check(run: Run) -> None:
    result = run(
        "check models.py:whole --schedule zb-v --devices 1 --micro-batches 3 --steps 2 --dtype bfloat16 "
        "--recompute always --tolerance 0.5 --json"
    )
    report = CheckReport.model_validate_json(result.stdout)
    (row,) = report.rows
    assert (row.schedule, row.stages, row.dtype, row.recompute) == ("zb-v", 2, "bfloat16", "always")
    assert (report.micro_batches, report.steps, row.tolerance) == (3, 2, 0.5)
