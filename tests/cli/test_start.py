"""How the command line starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import Result

import pipepart
import schedules
from pipepart.cli import app, options
from pipepart.planning.export import ENGINES

Run = Callable[..., Result]


START = """
import contextlib, runpy, sys
from pipepart.cli import app
for line in ("--help", "plan --help", "plan --no-such-option x", "plan x.json --schedule 1f1c"):
    with contextlib.suppress(SystemExit):
        app(line.split())
    print(line, {"torch", "numpy", "networkx"} & set(sys.modules))
sys.argv[1:] = ["simulate", "--devices", "two"]
try:
    runpy.run_module("pipepart", run_name="__main__")
except SystemExit as end:
    print("status", end.code)
for name in [name for name in sys.modules if name.partition(".")[0] in ("typer", "click", "rich", "pipepart")]:
    del sys.modules[name]
import pipepart
print("library", {"rich", "typer", "click", "sklearn"} & set(sys.modules))
"""


def test_help_and_wrong_options_import_nothing_heavy_nor_the_library_what_reports_need() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pipepart.__file__).parents[1])}
    command = [sys.executable, "-c", START]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    for line in ("--help", "plan --help", "plan --no-such-option x", "plan x.json --schedule 1f1c"):
        assert f"{line} set()" in done.stdout
    assert "status 2\nlibrary set()" in done.stdout
    assert "Invalid value for '--devices'" in done.stderr


def test_names_that_options_repeat_to_start_quickly_are_those_there_are(run: Run) -> None:
    assert sorted(get_args(options.ScheduleName)) == sorted(schedules.names())
    assert tuple(ENGINES) == get_args(options.Engine)
    assert run("--version").stdout.startswith("pipepart ")


def test_each_command_has_examples_that_name_it(run: Run) -> None:
    for command in app.registered_commands:
        examples = run(f"{command.name} -h").stdout.partition("Examples:")[2]
        assert examples.strip().startswith(f"pipepart {command.name} ")


def broken(*arguments: object) -> list[object]:
    return list(zip([1], [1, 2], strict=True))


def fails(error: Exception) -> Callable[..., None]:
    def fail(*reports: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("where", "instead", "status", "told", "error"),
    [
        ("pipepart.reporting.show", fails(BrokenPipeError(errno.EPIPE, "Broken pipe")), 1, "", ""),
        ("pipepart.reporting.show", fails(OSError(errno.ENOSPC, "No space")), 2, "no space is left on the device", ""),
        ("schedules.build", broken, 1, "", "zip() argument 2 is longer"),
    ],
    ids=["nobody reads on", "full device", "bug of pipepart"],
)  # fmt: skip
def test_what_ends_a_command_that_is_no_mistake_of_the_user(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str, instead: Any, status: int, told: str, error: str
) -> None:
    monkeypatch.setattr(where, instead)
    result = run("simulate --schedule gpipe --devices 2 --micro-batches 2", status)
    assert told in result.stderr
    assert bool(told) == bool(result.output)
    assert error in str(result.exception)
