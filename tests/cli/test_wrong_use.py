"""Wrong use of every command: status 2 and a message that names what was wrong, without a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Cluster, Profile, plan

Run = Callable[[str], Result]

CASES = [
    ("profile gone.py:model", "'gone.py' does not exist"),
    ("profile folder:model", "folder has no 'model': it has no function"),
    ("profile folder/x.py:model", "does not exist"),
    ("profile models.py", "does not name a model"),
    ("profile models.py:hole", "has no 'hole'"),
    ("profile models.py:sized(width=layers)", "argument layers is no literal"),
    ("profile 'models.py:sized(1, 2, 3)'", "too many positional arguments. It takes (width, depth=2)"),
    ("profile 'models.py:sized(wide=1)'", "write models.py:sized(width=...)"),
    ("profile 'models.py:sized(**{})'", "without **"),
    ("profile models.py:nothing", "returned NoneType where a model was expected"),
    ("profile models.py:ends", "models.py:ends ended the program, with 3, and returned no model"),
    ("profile models.py:loader", "the input must hold a tensor, got DataLoader"),
    ("profile models.py:whole --roofline 'cuda: 1 TFLOP/s, 1 TB/s, 4 us'", "add --no-measure"),
    ("profile models.py:whole --device cuda:99", "--device 'cuda:99': torch has no such device here"),
    ("profile models.py:whole --dtype bf16", "did you mean bfloat16?"),
    ("profile models.py:whole --micro-batches -1", "give a number of at least 1"),
    ("profile models.py:whole -o folder", "'folder': it is a directory"),
    ("profile models.py:whole -o gone/x.json", "there is no directory"),
    ("plan profile.json --devices 0", "0"),
    ("plan profile.json --devices -2", "give a number of at least 1"),
    ("plan profile.json --devices 2 --memory banana", "'banana' is not a size"),
    ("plan profile.json --devices 2 --memory 99999TiB", "'--memory': a size must be positive and at most 8192.0 TiB"),
    ("plan profile.json --device 16GiB@", "'' is not a speed"),
    ("plan profile.json --device 1GiB --bandwidth 0GB/s", "'--bandwidth': '0GB/s' is not a bandwidth"),
    ("plan profile.json --devices 2 --seconds inf", "a finite number above 0"),
    ("plan profile.json --devices 2 --no-measure", "--no-measure cannot change profile.json"),
    ("plan profile.json --devices 2 --micro-batches 3", "profiled with 2, 4 micro-batches, not with 3: add --estimate"),
    ("plan profile.json --devices 2 --micro-batches 13 --estimate", "from 1 to the 12 samples of the mini-batch"),
    ("plan profile.json --devices 2 --estimate", "--estimate goes with --micro-batches N"),
    ("plan profile.json --devices 2 --schedule zb-h", "did you mean zb-h"),
    ("plan plan.json --devices 2", "plan.json is a plan, and this command takes a profile"),
    ("plan odd.json --devices 2", "Invalid JSON"),
    ("plan folder.json --devices 2", "cannot read the profile 'folder.json'"),
    ("plan models.py:whole", "give the devices in one way"),
    ("explain gone.json", "cannot read the plan 'gone.json'"),
    ("explain odd.json", "Invalid JSON"),
    ("explain profile.json", "profile.json is a profile, and this command takes a plan"),
    ("explain newer.json", "a Plan of version 2, and this pipepart reads version 1: update pipepart"),
    ("explain plan.json --trace profile.json", "profile.json is a profile, and this command takes a trace"),
    ("explain plan.json -o plan.svg", "cannot save JSON in 'plan.svg'"),
    ("explain plan.json plan.json plan.json", "got 3 plans"),
    ("explain plan.json plan.json --trace odd.json", "goes with one plan"),
    ("explain plan.json --trace odd.json", "odd.json"),
    ("explain plan.json --trace cluster.json", "cluster.json"),
    ("check models.py:whole --plan plan.json --devices 2", "--devices: the plan says that"),
    ("check models.py:whole --cluster plan.json", "plan.json is a plan, and this command takes a cluster"),
    ("check models.py:whole --devices 2 --cluster cluster.json", "give the devices in one way"),
    ("check models.py:whole --tolerance -1", "--tolerance"),
    ("check models.py:whole --schedule gpip", "did you mean gpipe?"),
    ("check models.py:whole --dtype float12", "float12"),
    ("bench models.py:whole --plan plan.json --schedule gpipe", "--schedule: the plan says that"),
    ("bench models.py:whole --plan cluster.json", "cluster.json is a cluster, and this command takes a plan"),
    ("bench models.py:whole --steps 0", "--steps"),
    ("bench models.py:whole --trace gone/t.json", "there is no directory"),
    ("replan plan.json", "--trace"),
    ("replan plan.json --trace gone.json", "cannot read the trace 'gone.json'"),
    ("replan profile.json --trace odd.json", "profile.json is a profile"),
    ("report gone.json", "cannot read the plan 'gone.json'"),
    ("report plan.json -o folder", "'folder': it is a directory"),
    ("export plan.json --to megatro", "did you mean megatron?"),
    ("export plan.json", "--to"),
    ("cluster --device banana", "'banana' is not a size"),
    ("cluster --cluster odd.json", "Invalid JSON"),
    ("cluster --devices two", "torch has no such device here"),
    ("cluster --hosts 2", "go with devices described by --device"),
    ("cluster --bandwidth 3GB/s", "go with devices described by --device"),
    ("cluster --device 1GiB --hosts 2", "--hosts N and --network 25GB/s go together"),
    ("simulate --schedule 1f1c --devices 2 --micro-batches 2", "did you mean 1f1b"),
    ("simulate --schedule 1f1b --devices 0 --micro-batches 2", "--devices"),
    ("simulate --schedule 1f1b --devices 2 --micro-batches 2 --forward -1", "costs are seconds from 0 to 1e+06"),
    ("simulate --schedule 1f1b --devices 2 --micro-batches 2 --forward 1e300", "costs are seconds from 0 to 1e+06"),
    ("simulate --schedule 1f1b --devices 90000 --micro-batches 90000", "at most 4,000,000 are simulated"),
    ("simulate --schedule-file plan.json", "plan.json is a plan, and this command takes a schedule"),
]  # fmt: skip


@pytest.fixture
def files(directory: Path, measured: Profile) -> None:
    measured.save("profile.json")
    made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=2)
    made.save("plan.json")
    made.cluster.save("cluster.json")
    Path("newer.json").write_text(json.dumps({**json.loads(Path("plan.json").read_text()), "version": 2}))
    Path("odd.json").write_text("{")
    Path("folder").mkdir()
    Path("folder.json").mkdir()


@pytest.mark.parametrize(("line", "says"), CASES)
@pytest.mark.usefixtures("files")
def test_wrong_use_is_told_in_a_message(run: Run, line: str, says: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", ["profile", "check", "bench"])
def test_an_exception_of_the_factory_keeps_its_traceback(run: Run, command: str) -> None:
    result = run(f"{command} models.py:breaks")
    assert result.exit_code == 1
    assert 'models.py", line' in result.stderr
    assert "ValueError: no data on this disk" in result.stderr


def test_what_cannot_be_written_leaves_the_old_file(
    run: Run, files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    before = Path("plan.json").read_text()
    result = run("plan profile.json --devices 2 --schedule gpipe -o plan.json")
    assert result.exit_code == 2
    assert "cannot write 'plan.json': No space left on device" in result.stderr
    assert Path("plan.json").read_text() == before
    assert not list(Path().glob(".plan.json.*"))
