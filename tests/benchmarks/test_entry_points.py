"""Every benchmark starts, and its quick run ends with a table."""

from __future__ import annotations

import importlib

import pytest
import typer
from typer.testing import CliRunner

NAMES = ("cpu", "emulated", "gpu", "planning", "schedules", "split_backward", "tracing")


def run(name: str, *options: str) -> str:
    app = typer.Typer()
    app.command()(importlib.import_module(f"benchmarks.{name}").main)
    ended = CliRunner().invoke(app, list(options), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_explains_itself(name: str) -> None:
    assert "--help" in run(name, "--help")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "options", "heading"),
    [
        ("emulated", ["--model", "tiny", "--micro-batches", "4", "--rounds", "1"], "played"),
        ("schedules", ["--quick"], "search"),
        ("split_backward", ["--quick"], "quartiles"),
        ("tracing", ["--models", "tiny", "--rounds", "2"], "untraced"),
    ],
)
def test_a_quick_run_ends_with_a_table(name: str, options: list[str], heading: str) -> None:
    assert heading in run(name, *options)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_planning_benchmark_cuts_its_graphs() -> None:
    assert "nasnet" in run("planning", "--quick")
