"""Files that were edited into no plan: every fault is named, beside the path of the file."""

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipepart import Plan, Profile
from pipepart.input_error import InputError
from pipepart.planning import StagePlan
from tests.planning.plan_edits import CLUSTER, LAYERS, Data, chunked_plan, edited, move, swap, tied_plan
from tests.planning.plan_faults import FAULTS
from tests.planning.problems import profile_of


@pytest.fixture(scope="module")
def tied() -> Plan:
    return tied_plan()


@pytest.fixture(scope="module")
def chunked() -> Plan:
    return chunked_plan()


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_of_a_file_is_named_beside_its_path(case, tied, tmp_path):
    change, words = FAULTS[case]
    path = edited(tied, change, tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        Plan.load(path)
    text = str(caught.value)
    assert type(caught.value) is InputError
    assert text.startswith(str(path))
    for each in words:
        assert each in text
    assert text.count("\n") <= len(words) + 2


CHUNKED_FAULTS: dict[str, tuple[Callable[[Data], object], list[str]]] = {
    "two stages of a row on two devices": (
        lambda d: swap(d, "device"),
        ["has stages 0 and 3 on one device", "has stages 1 and 2 on one device"],
    ),
    "the schedule of one stage a device": (
        lambda d: d.update(schedule="interleaved-1f1b"),
        ["has stages 0 and 2 on one device", "has stages 1 and 3 on one device"],
    ),
    "a stage less": (
        lambda d: d["stages"][2]["layers"].extend(d["stages"].pop(3)["layers"]),
        ["3 stages are not 2 (chunks) for each device"],
    ),
    "all on one device": (
        lambda d: [stage.update(device="a") for stage in d["stages"]],
        ["stages 0 and 1 are both on device 'a', schedule 'zb-v' has them on two"],
    ),
}


@pytest.mark.parametrize("case", CHUNKED_FAULTS)
def test_every_fault_of_a_chunked_plan_is_named(case, chunked, tmp_path):
    change, words = CHUNKED_FAULTS[case]
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        Plan.load(edited(chunked, change, tmp_path / "plan.json"))
    for each in words:
        assert each in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"7", b"no json", b"\xff\xfe", b'{"stages": \xff}']
)
def test_a_file_that_is_no_plan(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json is not a Plan that this version reads"):
        Plan.load(path)


MEMORY_EDITS: dict[str, Callable[[Data], object]] = {
    "layers": lambda d: move(d, 0, 1),
    "devices": lambda d: swap(d, "device"),
    "schedule": lambda d: d.update(schedule="gpipe"),
    "recompute": lambda d: d["stages"][0].update(recompute="always"),
    "parameters": lambda d: (d["profile"]["layers"][0].update(parameter_bytes=900), d.update(fingerprint="")),
    "nothing": lambda d: None,
}


@pytest.mark.parametrize("edit", MEMORY_EDITS)
def test_after_any_edit_a_device_that_is_short_by_one_byte_is_refused(edit, tied, tmp_path):
    path = tmp_path / "plan.json"

    def limit(sizes: list[int]) -> Callable[[Data], None]:
        def change(data: Data) -> None:
            MEMORY_EDITS[edit](data)
            for device, size in zip(data["cluster"]["devices"], sizes, strict=True):
                device["memory_bytes"] = size

        return change

    needs = list(Plan.load(edited(tied, limit([10**6] * 3), path)).predicted.memory_bytes)
    exact = [need or 1 for need in needs]
    assert list(Plan.load(edited(tied, limit(exact), path)).predicted.memory_bytes) == needs
    used = [stage.device for stage in tied.stages]
    with pytest.raises(ValueError, match=r"plan\.json holds a plan that does not fit its devices") as caught:
        Plan.load(edited(tied, limit([max(need - 1, 1) for need in needs]), path))
    for name in used:
        need = needs[[device.name for device in tied.cluster.devices].index(name)]
        assert f"device {name!r} (stage " in str(caught.value)
        assert f"is short by 1 byte: it needs {need} (" in str(caught.value)


def test_a_plan_by_hand_needs_no_profile(tmp_path):
    stages = tuple(
        StagePlan(layers=(name,), device=device, static_bytes=10) for name, device in (("x", "a"), ("y", "b"))
    )
    plan = Plan(stages=stages, cluster=CLUSTER, schedule="1f1b", micro_batches=3)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    bare = {
        "stages": [{"layers": ["x"], "device": "only"}],
        "cluster": {"devices": [{"name": "only", "kind": "cpu"}]},
        "schedule": "gpipe",
        "micro_batches": 2,
    }
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    assert Plan.load(tmp_path / "bare.json").stages[0].layers == ("x",)


WRONG = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**9,
    1e400,
    math.nan,
    -0.5,
    1.5,
    "",
    "layer2",
    "b",
    "always",
    [],
    {},
    [0],
    ["layer1"],
]


@pytest.mark.parametrize("seed", range(40))
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
        read, error = outcome(path)
        if error is not None:
            assert type(error) is InputError
            assert str(error).startswith(str(path))
        elif read is not None and read.profile is not None:
            assert read.simulate().makespan == read.predicted.step_seconds


def outcome(path: Path) -> tuple[Plan, None] | tuple[None, Exception]:
    """The plan in a file, or what its loading raised."""
    try:
        return Plan.load(path), None
    except Exception as error:
        return None, error


BY_HAND: dict[str, tuple[Callable[[Data], object], str]] = {
    "a layer twice": (
        lambda d: d["stages"][1].update(layers=["x"]),
        "layer 'x' is there 2 times: in stages 0, 1",
    ),
    "an unknown device": (lambda d: d["stages"][0].update(device="z"), "stage 0 is on device 'z'"),
    "one device for two": (
        lambda d: d["stages"][1].update(device="a"),
        "stages 0 and 1 are both on device 'a'",
    ),
    "an unknown schedule": (lambda d: d.update(schedule="z"), "no schedule is called 'z'"),
    "too much by its own figures": (
        lambda d: d["stages"][0].update(static_bytes=4001),
        "device 'a' (stage 0) is short by 1 byte",
    ),
    "a prediction for other devices": (
        lambda d: d.update(
            prediction={
                "step_seconds": 1.0,
                "memory_bytes": [1],
                "bubble": 0.0,
                "bottleneck_seconds": 1.0,
                "serial_seconds": 1.0,
            }
        ),
        "the prediction has the memory of 1 devices, there are 3",
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_what_can_be_told_of_a_plan_by_hand_is_told(case, tmp_path):
    change, words = BY_HAND[case]
    stages = tuple(StagePlan(layers=(name,), device=device) for name, device in (("x", "a"), ("y", "b")))
    plan = Plan(stages=stages, cluster=CLUSTER, schedule="1f1b", micro_batches=3)
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        Plan.load(edited(plan, change, tmp_path / "plan.json"))
    assert words in str(caught.value)


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
