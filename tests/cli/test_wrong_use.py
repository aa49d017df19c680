"""Wrong use of every command: status 2 and a message that names what was wrong, without a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import schedules
from pipepart import Cluster, Plan, Profile, plan
from pipepart.document import FORMAT_VERSION

Run = Callable[..., Result]
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
        ("gone.json", "cannot read the plan 'gone.json'"),
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
