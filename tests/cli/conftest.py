"""Fixtures: a directory with a file of models, and a function that runs the command line there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner, Result

from pipepart import Profile, Roofline, profile
from pipepart.cli import app
from pipepart.profiling import Overhead

COMMAND = get_command(app)  # reading all annotations takes 40 ms, so that it is done once

MODELS = """
import torch
from torch import nn

print("imported")

def layers():
    print("made")
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

def whole():
    return layers(), torch.randn(12, 8), torch.randn(12, 4), nn.MSELoss()

def on_meta():
    with torch.device("meta"):
        return layers(), torch.randn(12, 8), torch.randn(12, 4), nn.MSELoss()

def tokens():
    return nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 2))

def sized(width, depth=2):
    return layers()

def nothing():
    pass

def five():
    return 1, 2, 3, 4, 5

def swapped():
    return torch.randn(12, 8), layers()

def swapped_loss():
    return layers(), torch.randn(12, 8), nn.MSELoss(), torch.randn(12, 4)

def breaks():
    raise ValueError("no data on this disk")

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) + x
        return {"tags": x, "loss": nn.functional.mse_loss(x, torch.zeros_like(x))}

def recorded():
    return Tagger(), torch.randn(12, 8)

instance = nn.Sequential(nn.Linear(8, 4))
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of every test, with ``models.py`` in it."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("models", "needy"):  # other tests have imported theirs from elsewhere
        sys.modules.pop(name, None)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command line, all after ``pipepart``, and checks its exit status."""
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMAND)

    def run(line: str, status: int | None = 0) -> Result:
        result = CliRunner().invoke(app, shlex.split(line))
        assert status in (None, result.exit_code), result.output
        return result

    return run


@pytest.fixture(scope="session")
def measured() -> Profile:
    """A profile of 12 samples in 2 and 4 micro-batches, of five layers."""
    chain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    speed = Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 1 us")  # the same figures each time
    found = profile(chain, torch.randn(12, 8), micro_batches=[2, 4], measure=False, roofline=speed)
    # A runtime that is fast beside these small layers.
    return found.model_copy(update={"overhead": Overhead(action_seconds=25e-6, message_seconds=20e-6)})


@pytest.fixture
def saved(measured: Profile, directory: Path) -> str:
    """The name of a file with that profile."""
    measured.save(directory / "saved.json")
    return "saved.json"


@pytest.fixture(autouse=True)
def _short_profiles(short_profiles: None) -> None:
    """The models of the commands are small."""
