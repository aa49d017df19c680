"""What the processes of a pipeline do in the tests of checkpoints. Each is called on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pipepart
from tests.checkpoint.training import batch, model, training

Borders = tuple[int, ...]  # of the stages, dealt out to the ranks in order


def train_and_save(
    folder: Path, borders: Borders, of_stages: bool, asynchronous: bool, replicas: int = 1
) -> dict[str, Tensor]:
    """Save after three steps, train two more, return the state."""
    with (made := training(borders, of_stages, replicas=replicas)).pipe:
        made.train(0, 3)
        pipepart.save(
            folder,
            made.pipe,
            made.optimizer,
            step=3,
            scheduler=made.scheduler,
            data={"batch": 3},
            asynchronous=asynchronous,
        )
        made.train(3, 5)
        return made.state()


def load_and_train(folder: Path, borders: Borders, of_stages: bool, replicas: int = 1) -> dict[str, Tensor]:
    """Load, train two steps, return the state."""
    with (made := training(borders, of_stages, replicas=replicas)).pipe:
        torch.manual_seed(77)
        found = pipepart.load(folder, made.pipe, made.optimizer, scheduler=made.scheduler)
        assert (found.step, found.data) == (3, {"batch": 3})
        made.train(3, 5)
        return made.state()


def save_with_one(folder: Path, rank: int, how: dict[str, Any]) -> str:
    """Save with other arguments on one rank; return what it raises."""
    with (made := training((5,))).pipe:
        mine = how if torch.distributed.get_rank() == rank else {}
        try:
            pipepart.save(folder, made.pipe, **{"optimizer": made.optimizer, "step": 1, **mine})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def load_with(folder: Path, rank: int) -> tuple[str, bool]:
    """Load with another optimizer on one rank; return what it raises, and whether the model is as it was."""
    with (made := training((5,))).pipe:
        before = made.state()
        optimizer: Any = made.optimizer
        if torch.distributed.get_rank() == rank:
            optimizer = torch.optim.SGD(made.pipe.parameters(), 0.1)
        try:
            pipepart.load(folder, made.pipe, optimizer)
        except Exception as error:
            after = made.state()
            return f"{type(error).__name__}: {error}", all(
                after[name].equal(one) for name, one in before.items()
            )
        return "", False


def call_apart(folder: Path) -> str:
    """Rank 0 saves and the other evaluates; return what this one raises."""
    made = training((5,))
    try:
        if torch.distributed.get_rank() == 0:
            pipepart.save(folder, made.pipe, step=1)
        else:
            made.pipe.evaluate(torch.randn(8, 6), target=torch.randn(8, 6))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        made.pipe.close()
    return ""


def train_the_last_layers(folder: Path, borders: Borders, loads: bool) -> dict[str, Any]:
    """Train two steps and save, or load these; then one more step. Return the whole state."""
    module = model()
    module[:6].requires_grad_(False)  # the weight that the last layer shares, too
    module[1].register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn))
    with training(borders, module=module).pipe as pipe:
        optimizer = torch.optim.Adagrad([one for one in pipe.parameters() if one.requires_grad], 0.1)
        if loads:
            pipepart.load(folder, pipe, optimizer)
        for number in range(2 if loads else 0, 3):
            if number == 2 and not loads:
                pipepart.save(folder, pipe, optimizer, step=2)
            x, y = batch(number)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return {name: one.float() for name, one in pipe.full_state_dict().items()}
