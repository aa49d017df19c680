"""How the command line starts, and wrong use of every command: status 2 and a message that names what was wrong."""

from __future__ import annotations

import errno
import json
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
from pipepart import Cluster, Plan, Profile, plan
from pipepart.cli import app, options
from pipepart.document import FORMAT_VERSION
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


SIZES = "--schedule 1f1b --devices 4 --micro-batches 8"

# Of each command: its arguments, and a part of the message.
CASES = {
    "profile": [
        ("gone.py:model", "'gone.py' is no Python file"),
        ("models.py", "does not name a model: write path/to/file.py:factory"),
        ("models.py:hole", "has no function 'hole': it has "),
        ("..:f", "not the name of a module"),
        ("models.py:swapped", "returned Tensor, Sequential: return"),
        ("models.py:swapped_loss", "the last is no loss function"),
        ("models.py:layers --input 4x8:float31", "dtypes are float32"),
        ("nomodule.sub:f", "no module 'nomodule'"),
        ("models.py:sized", "'width'. It takes (width, depth=2): write them as in models.py:sized(64"),
        ("'models.py:sized(1, 2, 3)'", "too many positional arguments. It takes (width, depth=2)"),
        ("models.py:sized(width=layers)", "give Python literals one by one"),
        ("models.py:nothing", "returned NoneType: return (model, sample, target, loss_fn)"),
        ("models.py:five", "returned int, int, int, int, int: return"),
        ("models.py:layers", "without a sample"),
        ("models.py:layers --input 4by8", "'4by8' is not a shape"),
        ("models.py:layers --input 4x8:int8:999", "out of bounds"),
        ("models.py:whole --micro-batches 0", "'0': give a number of at least 1, or several as in 2,4,8"),
        ("models.py:whole --device cuda:99", "--device 'cuda:99': torch has no such device here"),
        ("models.py:whole --roofline fast", "fast"),
        ("models.py:whole -o folder", "'folder': it is a directory"),
        ("models.py:whole -o profile.txt", "cannot save JSON in 'profile.txt': its name must end in .json"),
    ],
    "plan": [
        ("models.py:whole", "give the devices in one way"),
        ("profile.json --devices 2 --device 1GiB", "give the devices in one way"),
        ("profile.json --devices -2", "give a number of at least 1"),
        ("profile.json --devices two", "give a number of at least 1, or torch devices"),
        ("profile.json --devices 2 --bandwidth 1GB/s", "goes with devices described"),
        ("profile.json --devices 2 --more-devices 0", "'--more-devices'"),
        ("profile.json --devices 2 --schedule zigzag", "'zigzag'"),
        ("profile.json --devices 2 --recompute sometimes", "is not one of 'never', 'except-last', 'always', 'auto'"),
        ("profile.json --devices 2 --colocate 1,nine", "colocate names layer 'nine'"),
        ("profile.json --devices 2 --cut-before 0", "the first layer: nothing comes before it"),
        ("profile.json --devices 2 --cut-before 1 --colocate 0,1", "which are to stay together"),
        ("profile.json --devices 2 --compress fp8", "fp8"),
        ("profile.json --devices 2 --micro-batches some", "'--micro-batches': 'some'"),
        ("profile.json --devices 2 --micro-batches 3", "profiled with 2, 4 micro-batches, not with 3: add --estimate"),
        ("profile.json --devices 2 --estimate", "--estimate goes with --micro-batches N"),
        ("profile.json --devices 2 --seconds inf", "a finite number above 0"),
        ("profile.json --devices 2 --input 3x3 --threads 1", "--input, --threads cannot change profile.json"),
        ("profile.json --cluster profile.json", "profile.json is a profile, not a cluster"),
        ("plan.json --devices 2", "plan.json is a plan, not a profile"),
    ],
    "explain": [
        ("gone.json", "cannot read the plan 'gone.json': No such file"),
        ("newer.json", "a Plan of version 3, and this pipepart reads version 2: update pipepart"),
        ("plan.json --trace profile.json", "profile.json is no trace that pipe.trace() has saved"),
        ("plan.json --trace no_steps.json", "no_steps.json is no trace that pipe.trace() has saved"),
        ("plan.json --trace other.trace.json", "is no step of plan.json: its devices: 3, the plan's: 2"),
        ("plan.json plan.json plan.json", "got 3 plans"),
        ("plan.json plan.json --trace odd.json", "goes with one plan"),
    ],
    "simulate": [
        ("", "give a saved plan, or describe the stages"),
        ("--schedule 1f1c --devices 4 --micro-batches 8", "did you mean '1f1b'?"),
        (f"{SIZES} --micro-batches 0", "Invalid value for '--micro-batches'"),
        (f"{SIZES} --forward 1,2", "--forward has 2 numbers for 4 stages: give 1 or 4"),
        (f"{SIZES} --forward slow", "'--forward': 'slow': give one number for a device"),
        (f"{SIZES} --forward 1e300", "costs are seconds from 0 to 1e+06"),
        (f"{SIZES} --stash much", "'much' is not a size"),
        (f"{SIZES} -o a.pdf", "-o a.pdf: the suffix says what to save, give one of .svg"),
        (f"{SIZES} --schedule gpipe -o a.csv", "a.csv holds one schedule, and 2 are given"),
        ("--schedule gpipe --devices 300 --micro-batches 1 -o a.svg", "and gpipe has 300 and 600"),
        ("--schedule 1f1b --devices 90000 --micro-batches 90000", "at most 4,000,000 are simulated"),
        ("--schedule three.csv --micro-batches 2", "three.csv has its devices, micro-batches and chunks"),
        ("--schedule gone.csv", "cannot read the schedule 'gone.csv'"),
        ("--schedule odd.csv", "odd.csv holds no schedule that runs"),
        ("--schedule odd.json", "holds no schedule that runs: not a schedule as Schedule.to_json writes it"),
        ("plan.json --devices 2", "--devices cannot change plan.json"),
        ("plan.json --schedule zb-v", "plan again with this schedule"),
    ],
    "check": [
        ("models.py:whole --dtype float63", "float63"),
        ("models.py:whole --reduction median", "'median' is not one of 'mean', 'sum', 'batch'"),
        ("models.py:whole --devices 9", "has 9 stages, the model 5 layers"),
        ("models.py:whole --plan plan.json --devices 2", "--devices: the plan says that"),
    ],
    "bench": [
        ("models.py:whole --plan plan.json --schedule gpipe", "--schedule: the plan says that"),
        ("models.py:whole --plan cluster.json", "cluster.json is a cluster, not a plan"),
    ],
    "replan": [
        ("plan.json", "--trace"),
        ("plan.json --trace gone.json", "cannot read the trace 'gone.json'"),
    ],
    "report": [
        ("plan.json other.json plan.json", "got 3 plans: a report shows one, or two side by side"),
        ("plan.json other.json --trace other.trace.json", "got 1 --trace for 2 plans: give one for each plan, or none"),
    ],
    "export": [
        ("plan.json", "--to"),
        ("plan.json --to megatorn", "'megatorn' is not one of"),
        ("plan.json --to torchtitan", "torchtitan cannot run this plan"),
        ("plan.json --to torch-pipelining -o plan.json", "cannot write into 'plan.json'"),
    ],
    "cluster": [
        ("--devices two", "torch has no such device here"),
        ("--hosts 2", "go with devices described by --device"),
        ("--bandwidth 3GB/s", "go with devices described by --device"),
        ("--device 1GiB --hosts 2", "--hosts N and --network 25GB/s go together"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(measured: Profile) -> dict[str, str]:
    """The files that the command lines name."""
    two = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=2, stages=2)
    three = plan(measured, Cluster.virtual(3), schedule="1f1b", micro_batches=2, stages=3)
    return {
        "profile.json": measured.model_dump_json(),
        "plan.json": two.model_dump_json(),
        "other.json": three.model_dump_json(),
        "other.trace.json": json.dumps(three.simulate().to_trace()),
        "cluster.json": two.cluster.model_dump_json(),
        "newer.json": json.dumps({**json.loads(two.model_dump_json()), "version": FORMAT_VERSION + 1}),
        "odd.json": "{",
        "no_steps.json": '{"otherData": {"timelines": 3}}',
        "odd.csv": "0F0,1B9\n",
        "three.csv": schedules.build("1f1b", devices=3, micro_batches=2).to_csv(),
    }


@pytest.fixture
def files(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("folder").mkdir()


@pytest.mark.parametrize("command", CASES)
@pytest.mark.usefixtures("files")
def test_wrong_use_is_told_in_a_message(run: Run, command: str) -> None:
    before = {*Path().iterdir(), Path("__pycache__")}
    for arguments, says in CASES[command]:
        result = run(f"{command} {arguments}", None)
        told = " ".join(result.stderr.replace("│", " ").split())
        found = (result.exit_code, says in told, "Traceback" in told, result.stdout)
        assert found == (2, True, False, ""), f"pipepart {command} {arguments} printed\n{result.output}"
    assert {*Path().iterdir()} <= before  # nothing was written


@pytest.mark.parametrize("command", ["profile", "check", "bench"])
def test_an_exception_of_the_factory_keeps_its_traceback(run: Run, command: str) -> None:
    result = run(f"{command} models.py:breaks", 1)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "no data on this disk"


def test_what_cannot_be_written_leaves_the_old_file(
    run: Run, files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    before = Path("plan.json").read_text()
    result = run("plan profile.json --devices 2 --schedule gpipe -o plan.json", 2)
    assert "cannot write 'plan.json': No space left on device" in result.stderr
    assert Plan.load("plan.json")
    assert Path("plan.json").read_text() == before
    assert not list(Path().glob(".plan.json.*"))
