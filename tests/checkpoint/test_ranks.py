"""Checkpoints of several processes load in any other number of them, and failures of one rank reach all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipepart
from tests.checkpoint.training import Training, batch, model, training
from tests.support import plain
from tests.support.ranks import ranks

Borders = tuple[int, ...]  # of the stages, dealt out to the ranks in order


def train_and_save(folder: Path, borders: Borders, of_stages: bool, replicas: int = 1) -> dict[str, Tensor]:
    """Save after three steps, train two more, return the state."""
    with (made := training(borders, of_stages, replicas=replicas)).pipe:
        made.train(0, 3)
        made.save(folder, 3, data={"batch": 3})
        made.train(3, 5)
        return made.state()


def load_and_train(folder: Path, borders: Borders, of_stages: bool, replicas: int = 1) -> dict[str, Tensor]:
    """Load, train two steps, return the state."""
    with (made := training(borders, of_stages, replicas=replicas)).pipe:
        torch.manual_seed(77)
        found = made.load(folder)
        assert (found.step, found.data) == (3, {"batch": 3})
        made.train(3, 5)
        return made.state()


def refused(act: Callable[[Training, int], Any]) -> str:
    """What an act of this rank raises, whose training has to stay as it is."""
    with (made := training((5,))).pipe:
        before = made.state()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            act(made, torch.distributed.get_rank())
        plain.assert_same(made.state(), before)
        return f"{type(caught.value).__name__}: {caught.value}"


def save_with_one(folder: Path, how: dict[str, Any]) -> str:
    return refused(
        lambda made, rank: pipepart.save(
            folder, made.pipe, **{"optimizer": made.optimizer, "step": 1, **(how if rank else {})}
        )
    )


def load_with(folder: Path, rank: int) -> str:

    def load(made: Training, own: int) -> None:
        optimizer = torch.optim.SGD(made.pipe.parameters(), 0.1) if own == rank else made.optimizer
        pipepart.load(folder, made.pipe, optimizer)

    return refused(load)


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


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all ranks: no two have the same."""
    found: dict[str, Tensor] = {}
    for part in parts:
        assert not found.keys() & part.keys()
        found |= part
    return found


THREE = 3, (2, 5)
# In the last one a rank has no parameters.
LAYOUTS: list[tuple[int, Borders]] = [(1, (4,)), (2, (5,)), (2, (1, 3, 6)), THREE, (3, (6, 7))]


@pytest.mark.parametrize(
    ("saved", "of_stages", "loaded"),
    [
        (THREE, False, [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]]),
        (LAYOUTS[2], True, [THREE]),
        (LAYOUTS[0], False, [LAYOUTS[1]]),
    ],
)
def test_training_goes_on_bit_for_bit_in_another_number_of_ranks(tmp_path, saved, of_stages, loaded):
    def run(size, case, *args):
        return case(*args) if size == 1 else merged(ranks(size).run(case, *args))

    size, borders = saved
    wanted = run(size, train_and_save, tmp_path, borders, of_stages)
    for other, cut in loaded:
        plain.assert_same(run(other, load_and_train, tmp_path, cut, of_stages), wanted)


def test_ranks_that_train_nothing_have_an_optimizer_without_parameters_of_the_model(tmp_path):
    wanted = ranks(2).run(train_the_last_layers, tmp_path, (4,), False)
    found = [
        *ranks(3).run(train_the_last_layers, tmp_path, (2, 5), True),
        train_the_last_layers(tmp_path, (4,), True),
    ]
    for state in (wanted[1], *found):
        plain.assert_same(state, wanted[0])


def test_replicas_write_a_stage_once_and_all_read_it(tmp_path):
    wanted, _ = ranks(2).run(train_and_save, tmp_path, (), False, 2)
    files = {path.name for path in (tmp_path / "step-3").iterdir()}
    assert {"model-00001-of-00002.safetensors", "rank-0.json", "rank-1.json"} <= files
    assert json.loads((tmp_path / "step-3" / "optimizer-1.json").read_text()) == {"groups": [], "state": {}}
    found, other = ranks(2).run(load_and_train, tmp_path, (), False, 2)
    plain.assert_same(found, wanted)
    parameters = dict(model().named_parameters())  # statistics of BatchNorm follow at the next step
    assert all(other[name].equal(wanted[name]) for name in parameters)
    assert pipepart.load(tmp_path, model()).step == 3


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ({"step": 2}, "RuntimeError: rank 1 calls save(", None),
        ({"optimizer": None}, "InputError: rank 1 has no optimizer to save, and rank 0 has one", None),
        (
            {"data": {1, 2}},
            "InputTypeError: data is a set",
            "RuntimeError: rank 1 failed: InputTypeError: data is a set",
        ),
    ],
)
def test_arguments_that_are_wrong_on_one_rank_are_refused_on_all(tmp_path, how, own, others):
    def case(rank: int) -> str:
        return own if rank == 1 or others is None else others

    found = ranks(2).run(save_with_one, tmp_path / "run", how)
    assert all(text.startswith(case(rank)) for rank, text in enumerate(found)), found
    assert not (tmp_path / "run").exists()


def test_a_rank_that_cannot_load_keeps_all_from_it(tmp_path):
    ranks(2).run(train_and_save, tmp_path, (5,), False)
    found = ranks(2).run(load_with, tmp_path, 1)
    assert "that of a AdamW, and the optimizer is a SGD" in found[1]
    assert found[0].startswith("RuntimeError: rank 1 failed: InputError: the optimizer state of")


def test_a_damaged_file_is_found_by_the_rank_that_verifies_it(tmp_path):
    ranks(2).run(train_and_save, tmp_path, (5,), False)
    for path in (tmp_path / "step-3").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        found = ranks(2).run(load_with, tmp_path, 2)
        assert all(text.startswith("CheckpointError") and path.name in text for text in found), found
        path.write_bytes(content)
