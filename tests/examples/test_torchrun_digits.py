"""Trainings that are killed, stopped and started with fewer processes end with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pipepart
from tests.support.seeds import seeds

ROOT = Path(__file__).parents[2]
STEPS = 36


def start(folder: Path, *options: str, steps: int = STEPS, replicas: int = 1) -> subprocess.Popen[str]:
    """Start the example under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "examples.torchrun_digits"]
    return subprocess.Popen(
        [*command, str(folder), "--steps", str(steps), "--save-every", "4", "--replicas", str(replicas)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end, which must be a success; return what was printed."""
    try:
        text, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, text[-5000:]
    return text


def trained(folder: Path) -> dict[str, Tensor]:
    """The parameters of the last checkpoint, and the state of its optimizer."""
    from examples.torchrun_digits import (
        network,  # of slow tests alone, as with all that is imported late here
    )

    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    assert pipepart.load(folder, model, optimizer).step == STEPS
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return found


def assert_same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = trained(folder)
    assert found.keys() == expected.keys()
    assert [name for name in found if not found[name].equal(expected[name])] == []


def alone(folder: Path, steps: int = STEPS, replicas: int = 1) -> None:
    """Train in this process."""
    pytest.importorskip("sklearn")
    from examples.torchrun_digits import main

    line = f"{folder} --steps {steps} --save-every 4 --replicas {replicas}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["torchrun_digits", *line.split()])
        main()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    alone(folder)
    return trained(folder)


def workers_of(agent: int) -> list[int]:
    """The processes that an agent of torchrun has started."""
    text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
    return [int(child) for child in text.split() if _runs_the_example(int(child))]


def _runs_the_example(process: int) -> bool:
    try:
        return b"examples.torchrun_digits" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), default=0)


def wait_for_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    had = newest(folder)
    while newest(folder) == had and process.poll() is None:
        time.sleep(0.01)


def kill_one(process: subprocess.Popen[str], folder: Path, draw: random.Random) -> None:
    """Kill a process of the training at a random moment behind its next checkpoint, or while it starts."""
    if draw.random() < 0.7:
        wait_for_checkpoint(process, folder)
    time.sleep(draw.uniform(0.0, 0.3))
    while process.poll() is None:
        if found := workers_of(process.pid):
            os.kill(draw.choice(found), signal.SIGKILL)
            return
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_of_two_hosts_goes_on_when_a_process_and_then_a_host_ends(tmp_path, undisturbed):
    """A process is killed at a random moment; both hosts start theirs again. Then all of a host is killed."""
    (seed,) = seeds(1, "killed")
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf"]
    first, second = (
        start(tmp_path, *options, f"last_call_timeout=5,is_host={has_store}") for has_store in (1, 0)
    )
    try:
        kill_one(second, tmp_path, random.Random(seed))
        wait_for_checkpoint(first, tmp_path)
        for process in [*workers_of(second.pid), second.pid]:
            os.kill(process, signal.SIGKILL)
        finish(first)
    finally:
        second.kill()
        second.communicate()
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_that_load_a_part_each_train_as_one_process_does(tmp_path):
    """Two replicas go on with the checkpoint of one process, in the middle of an epoch."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone(one, STEPS - 8, replicas=2)
    shutil.copytree(one, two, symlinks=True)
    alone(one, STEPS, replicas=2)
    text = finish(start(two, "--standalone", "--nproc-per-node", "2", replicas=2))
    assert f"1f1b> begins behind step {STEPS - 8}" in text
    assert_same(two, trained(one))
