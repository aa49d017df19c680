"""Checkpoints of several processes load in any other number of them, and failures of one rank reach all."""

from __future__ import annotations

import json

import pytest
from torch import Tensor

import pipepart
from tests.checkpoint import rank_cases
from tests.checkpoint.training import adam, assert_equal, model
from tests.support.ranks import ranks


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all ranks: no two have the same."""
    found: dict[str, Tensor] = {}
    for part in parts:
        assert not found.keys() & part.keys()
        found |= part
    return found


THREE = 3, (2, 5)
LAYOUTS: list[tuple[int, tuple[int, ...]]] = [
    (1, (4,)),
    (2, (5,)),
    (2, (1, 3, 6)),
    THREE,
    (3, (6, 7)),
]  # a rank without parameters


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
    wanted = run(size, rank_cases.train_and_save, tmp_path, borders, of_stages, saved == THREE)
    for other, cut in loaded:
        assert_equal(run(other, rank_cases.load_and_train, tmp_path, cut, of_stages), wanted)


def test_ranks_that_train_nothing_have_an_optimizer_without_parameters_of_the_model(tmp_path):
    wanted = ranks(2).run(rank_cases.train_the_last_layers, tmp_path, (4,), False)
    found = [
        *ranks(3).run(rank_cases.train_the_last_layers, tmp_path, (2, 5), True),
        rank_cases.train_the_last_layers(tmp_path, (4,), True),
    ]
    for state in (wanted[1], *found):
        assert_equal(state, wanted[0])


def test_replicas_write_a_stage_once_and_all_read_it(tmp_path):
    wanted, _ = ranks(2).run(rank_cases.train_and_save, tmp_path, (), False, False, 2)
    files = {path.name for path in (tmp_path / "step-3").iterdir()}
    assert {"model-00001-of-00001.safetensors", "rank-0.json", "rank-1.json"} <= files
    assert json.loads((tmp_path / "step-3" / "optimizer-1.json").read_text()) == {"groups": [], "state": {}}
    found, other = ranks(2).run(rank_cases.load_and_train, tmp_path, (), False, 2)
    assert_equal(found, wanted)
    parameters = dict(model().named_parameters())  # statistics of BatchNorm follow at the next step
    assert all(other[name].equal(wanted[name]) for name in parameters)
    assert pipepart.load(tmp_path, model()).step == 3


def test_the_files_of_three_ranks_are_those_of_one_model(tmp_path):
    ranks(3).run(rank_cases.train_and_save, tmp_path, (2, 5), False, False)
    path = tmp_path / "step-3"
    weights = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    module = model()
    assert sorted(weights) == sorted(set(module.state_dict()) - {"7.weight"})
    assert {weights["0.weight"], weights["2.weight"], weights["7.bias"]} == {
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    }
    optimizer = adam(module.parameters())
    assert pipepart.load(path, module, optimizer).step == 3
    assert {state["step"].item() for state in optimizer.state.values()} == {3}
    assert len(optimizer.state) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ({"step": -1}, "InputError: step must be", "RuntimeError: rank 1 failed: InputError: step must be"),
        ({"step": 2}, "InputError: rank 1 has step=2, and rank 0 step=1", None),
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

    found = ranks(2).outcomes(rank_cases.save_with_one, tmp_path / "run", 1, how)
    assert all(text.startswith(case(rank)) for rank, text in enumerate(found)), found
    assert not (tmp_path / "run").exists()


def test_a_rank_that_cannot_load_keeps_all_from_it(tmp_path):
    ranks(2).run(rank_cases.train_and_save, tmp_path, (5,), False, False)
    found = ranks(2).run(rank_cases.load_with, tmp_path, 1)
    assert [unchanged for _, unchanged in found] == [True, True]
    assert "that of a AdamW, and the optimizer is a SGD" in found[1][0]
    assert found[0][0].startswith("RuntimeError: rank 1 failed: InputError: the optimizer state of")


def test_a_damaged_file_is_found_by_the_rank_that_verifies_it(tmp_path):
    ranks(2).run(rank_cases.train_and_save, tmp_path, (5,), False, False)
    for path in (tmp_path / "step-3").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        found = ranks(2).run(rank_cases.load_with, tmp_path, 2)
        assert all(text.startswith("CheckpointError") and path.name in text for text, _ in found), found
        path.write_bytes(content)


def test_a_save_on_one_rank_only_is_named(tmp_path):
    found = ranks(2).run(rank_cases.call_apart, tmp_path)
    wanted = (
        "RuntimeError: rank 1 calls evaluate(return_outputs=False) (call 0) while rank 0 calls save (call 0)"
    )
    assert all(text.startswith(wanted) for text in found), found
