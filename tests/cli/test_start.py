"""How the command line starts."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import pipepart
import schedules
from pipepart.cli import app, options

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
        for command in ("profile", "plan", "explain", "simulate", "cluster"):
            assert command in result.stdout


def test_each_command_has_examples_that_name_it_and_a_whole_sentence_in_the_list(run: Run) -> None:
    listed = run("--help").stdout
    assert "..." not in listed.partition("Commands:")[2]
    for command in app.registered_commands:
        text = run(f"{command.name} --help").stdout
        assert f"Examples:\n  pipepart {command.name} " in text
        assert "{" not in text.splitlines()[0]


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.startswith("pipepart ")


def test_python_runs_the_package(directory: Path) -> None:
    result = python("-m", "pipepart", "profile", "models.py:whole", "--micro-batches", "0")
    assert result.returncode == 2
    assert "'--micro-batches': '0': give a number of at least 1, or several as in 2,4,8" in result.stderr


def test_help_and_wrong_options_import_nothing_heavy() -> None:
    script = """
import contextlib, sys
from pipepart.cli import app
for line in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        app(line.split())
    print(line, {"torch", "numpy", "networkx", "rich"} & set(sys.modules))
"""
    lines = ["--help", "plan --help", "plan --no-such-option x", "check x.py:f --schedule 1f1c"]
    printed = python("-c", script, *lines).stdout
    for line in lines:
        assert f"{line} set()" in printed


def test_the_names_of_schedules_in_options_are_those_there_are() -> None:
    assert sorted(options.SCHEDULES) == sorted(schedules.names())


def test_the_library_does_not_import_what_only_reports_need() -> None:
    result = python(
        "-c", "import pipepart, sys; print({'rich', 'typer', 'click', 'sklearn'} & set(sys.modules))"
    )
    assert result.stdout == "set()\n"


def test_output_that_nobody_reads_on_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*reports: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("pipepart.reporting.show", closed)
    result = run("simulate --schedule gpipe --devices 2 --micro-batches 2")
    assert result.exit_code == 1
    assert not result.output


def test_a_full_device_is_told_in_a_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*reports: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipepart.reporting.show", full)
    result = run("simulate --schedule gpipe --devices 2 --micro-batches 2")
    assert result.exit_code == 2
    assert "no space is left on the device" in result.stderr


def test_a_bug_of_pipepart_is_no_mistake_of_the_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> list[object]:
        return list(zip([1], [1, 2], strict=True))

    monkeypatch.setattr("schedules.build", broken)
    result = run("simulate --schedule gpipe --devices 2 --micro-batches 2")
    assert result.exit_code == 1
    assert "zip() argument 2 is longer" in result.stderr
    assert "Traceback" in result.stderr


def test_what_callers_give_is_refused_with_a_type_of_its_own() -> None:
    """A plain ValueError would be taken for a bug of pipepart."""

    def raises_plain(path: Path) -> bool:
        raised = (
            node.exc
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Raise) and node.exc
        )
        names = (node for exception in raised for node in ast.walk(exception) if isinstance(node, ast.Name))
        return any(name.id in ("ValueError", "TypeError") for name in names)

    files = Path(pipepart.__file__).parent.rglob("*.py")
    plain = [path.name for path in files if raises_plain(path)]
    assert not plain, "raise InputError or InputTypeError, which end a command with status 2"
