"""Files that were edited into no plan: every fault is named, beside the path of the file."""

import copy
import json
import math
import pickle
import random
from typing import Any

import pytest

from pipepart import Plan, Profile
from pipepart.input_error import InputError
from tests.planning.plan_edits import CHUNKED_FAULTS, FAULTS, LAYERS, Data, chunked_plan, edited, tied_plan
from tests.planning.problems import profile_of


@pytest.fixture(scope="module")
def tied() -> Plan:
    return tied_plan()


@pytest.fixture(scope="module")
def chunked() -> Plan:
    return chunked_plan()


@pytest.mark.parametrize("case", [*FAULTS, *CHUNKED_FAULTS])
def test_every_fault_of_a_file_is_named_beside_its_path(case, tied, chunked, tmp_path):
    plan, (change, words) = (tied, FAULTS[case]) if case in FAULTS else (chunked, CHUNKED_FAULTS[case])
    path = edited(plan, change, tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        Plan.load(path)
    text = str(caught.value)
    assert type(caught.value) is InputError
    assert text.startswith(str(path))
    for each in words:
        assert each in text
    assert text.count("\n") <= len(words) + 2


@pytest.mark.parametrize("content", [b"", b"[]", b"no json", b"\xff\xfe"])
def test_a_file_that_is_no_plan(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json is not a Plan that this version reads"):
        Plan.load(path)


def test_a_plan_by_hand_needs_no_profile(tmp_path):
    bare = {
        "stages": [{"layers": ["x"], "device": "only"}],
        "cluster": {"devices": [{"name": "only", "kind": "cpu"}]},
        "schedule": "gpipe",
        "micro_batches": 2,
    }
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    plan = Plan.load(tmp_path / "bare.json")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


NUMBERS = [-1, 0, 1, 3, 10**9, 1e400, math.nan, -0.5, 1.5]
WRONG = [None, True, *NUMBERS, "", "layer2", "b", "always", [], {}, [0], ["layer1"]]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_written_into_a_file_it_loads_or_is_refused(seed, tied, chunked, tmp_path):
    """Up to three values anywhere in the file are replaced or left out."""
    draw = random.Random(seed)

    def change(data: Data) -> None:
        for _ in range(draw.randint(1, 3)):
            place: Any = data
            while True:
                key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.1:
                    break
                place = place[key]
            if draw.random() < 0.2:
                del place[key]
                if not data:
                    return
            else:
                place[key] = copy.deepcopy(draw.choice(WRONG))

    for plan in (tied, chunked):
        path = edited(plan, change, tmp_path / "plan.json")
        try:
            read = Plan.load(path)
        except Exception as error:
            assert type(error) is InputError  # noqa: PT017
            assert str(error).startswith(str(path))  # noqa: PT017
        else:
            assert read.profile is None or read.simulate().makespan == read.predicted.step_seconds


def test_a_profile_that_was_edited_is_refused_by_every_fault(tmp_path):
    profile_of(LAYERS, [4]).save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    data["layers"][1]["name"] = "layer0"
    data["costs"][0]["layers"].pop()
    data["optimizer"] = "lion"
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"profile\.json is not a Profile") as caught:
        Profile.load(tmp_path / "profile.json")
    for words in ("two layers are called 'layer0'", "7 layers have costs", "optimizer 'lion'"):
        assert words in str(caught.value)


def test_a_plan_goes_to_other_processes_with_what_it_has_looked_up(tied):
    assert tied.simulate().makespan > 0
    assert pickle.loads(pickle.dumps(tied)) == copy.deepcopy(tied) == tied
