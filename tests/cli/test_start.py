"""How the command line starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import pipepart

Run = Callable[[str], Result]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(pipepart.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_help_names_the_commands(run: Run) -> None:
    for line in ("--help", "-h"):
        result = run(line)
        assert result.exit_code == 0
        for command in ("profile", "plan", "explain", "simulate"):
            assert command in result.stdout


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.startswith("pipepart ")


def test_python_runs_the_package(directory: Path) -> None:
    result = python("-m", "pipepart", "profile", "models.py:whole", "--seconds", "0", "--micro-batches", "0")
    assert result.returncode == 2
    assert (
        result.stderr == "Error: --micro-batches '0': give a number of at least 1, or several as in 2,4,8\n"
    )


def test_the_library_does_not_import_what_only_reports_need() -> None:
    result = python(
        "-c", "import pipepart, sys; print({'rich', 'typer', 'click', 'sklearn'} & set(sys.modules))"
    )
    assert result.stdout == "set()\n"


def test_output_that_nobody_reads_on_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*reports: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("pipepart.reporting.show", closed)
    result = run("simulate --schedule gpipe --devices 2 --micro-batches 2")
    assert result.exit_code == 1
    assert not result.output
