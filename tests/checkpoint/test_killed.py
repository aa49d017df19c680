"""A training killed repeatedly, within and between saves, ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import hashlib
import random
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoint.training import training
from tests.support.processes import run_script
from tests.support.seeds import seeds

KILLS = 20
STEPS = 20

# Writes to a file which steps are saved, and that it has ended. Kills itself before a chosen change of the folder, or
# at a chosen time.
SCRIPT = """
import os, random, signal, sys, threading, time, warnings
import torch
import pipepart
from tests.checkpoint.test_killed import STEPS, digest
from tests.checkpoint.training import training

warnings.simplefilter("error")  # no checkpoint may be damaged
folder, notes, draw = {folder!r}, {notes!r}, random.Random({seed})

def note(text):
    with open(notes, "a") as file:
        file.write(text + "\\n")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def count_down(event, args, left=[draw.randrange(1, 120)]):
    if event in ("open", "os.rename", "os.mkdir", "os.symlink", "os.rmdir", "os.remove") and folder in str(args[0]):
        left[0] -= 1
        if left[0] == 0:
            kill()

def wait():
    time.sleep(seconds)
    kill()

seconds = draw.uniform(0.01, 0.4)
if draw.random() < 0.5:
    sys.addaudithook(count_down)
else:
    threading.Thread(target=wait, daemon=True).start()
torch.manual_seed(0)
made = training()
try:
    start = pipepart.load(folder, made.pipe, made.optimizer, scheduler=made.scheduler).step
except FileNotFoundError:
    start = 0
note(f"start {{start}}")
for step in range(start, STEPS):
    made.train(step, step + 1)
    saving = pipepart.save(
        folder, made.pipe, made.optimizer, step=step + 1, scheduler=made.scheduler, keep=2
    )
    if step % 2:
        note(f"saved {{int(saving.name[5:])}}")
made.pipe.close()
note(f"end {{digest(made)}}")
"""


def digest(made: object) -> str:
    """A hash of all bits of a training's state."""
    state = made.state()  # type: ignore[attr-defined]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


FULL = """
import resource, signal
from torch import nn
import pipepart
module = nn.Linear(100, 100)
pipepart.save({folder!r}, module, step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
pipepart.save({folder!r}, module, step=2)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ended = run_script(FULL.format(folder=str(tmp_path)))
    assert "File too large" in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with (undisturbed := training()).pipe:
        undisturbed.train(0, STEPS)
        wanted = digest(undisturbed)
    kills = 0
    for number, seed in enumerate(seeds(2 * KILLS, "kills")):
        if kills >= KILLS:
            break
        draw, folder, notes = random.Random(seed), tmp_path / f"run {number}", tmp_path / f"notes {number}"
        while True:
            script = SCRIPT.format(folder=str(folder), notes=str(notes), seed=draw.randrange(10**9))
            ended = run_script(script)
            assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
            if ended.returncode == 0:
                break
            kills += 1
        said = [line.split() for line in notes.read_text().splitlines()]
        saved = 0
        for what, value in said:
            if what == "end":  # one that is killed behind its end is started again
                assert value == wanted
                continue
            assert what == "saved" or int(value) >= saved
            saved = max(saved, int(value))
        assert said[-1] == ["end", wanted]
    assert kills >= KILLS
