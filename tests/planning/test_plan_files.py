"""Files that were edited into no plan: every fault is named, beside the path of the file."""

import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipepart
from pipepart import Cluster, Device, Link, Plan, Profile
from pipepart.cluster import PairLink
from pipepart.input_error import InputError
from pipepart.planning import Alternative
from tests.planning.problems import Layer, profile_of

Data = dict[str, Any]

LAYERS = [
    Layer(
        forward=1 + index % 3, backward_input=2, backward_weight=1, parameters=4, output=8 + index, saved=16
    )
    for index in range(8)
]
CLUSTER = Cluster(
    devices=tuple(
        Device(name=name, kind="made up", memory_bytes=4000, speed=speed)
        for name, speed in (("a", 1.0), ("b", 0.5), ("idle", 0.25))
    ),
    link=Link(bandwidth=100.0, latency=0.125),
    links=(PairLink(between=("a", "idle"), latency=1.0),),
)


def tied_plan() -> Plan:
    """Eight layers over two of three devices, of which the third and the fourth share a parameter."""
    layers = [*LAYERS]
    layers[3] = Layer(forward=1, parameters=4, output=3, shares_with=(2,))
    plan = pipepart.plan(profile_of(layers, [4]), CLUSTER, schedule="1f1b", stages=2)
    other = Alternative(schedule="gpipe", micro_batches=4, chunks=1, stages=2, why="slower")
    return plan.model_copy(update={"alternatives": (other,)})


def chunked_plan() -> Plan:
    """Eight layers as four stages over two devices, there and back."""
    devices = CLUSTER.devices[:2]
    cluster = Cluster(devices=devices, link=Link(latency=0.125))
    return pipepart.plan(profile_of(LAYERS, [4]), cluster, schedule="zb-v")


def edited(plan: Plan, change: Callable[[Data], object], path: Path) -> Path:
    plan.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def move(data: Data, source: int, target: int, at: int = -1) -> None:
    """Moves a layer to another stage, in front of its layers or behind them."""
    layer = data["stages"][source]["layers"].pop(at)
    own = data["stages"][target]["layers"]
    own.insert(0 if source < target else len(own), layer)


def costs(data: Data) -> Data:
    return data["profile"]["costs"][0]


# The tied plan: what is done to its file, and the faults that have to be named, all of them in one message.
FAULTS: dict[str, tuple[Callable[[Data], object], list[str]]] = {
    # layers
    "a layer in two stages": (
        lambda d: d["stages"][0]["layers"].append("layer7"),
        ["layer 'layer7' is there 2 times: in stages 0, 1"],
    ),
    "layers in another order": (
        lambda d: d["stages"][1]["layers"].reverse(),
        ["stage 1 has layer 'layer7' where the model runs 'layer6': stages are consecutive layers"],
    ),
    # devices
    "one device for two stages": (
        lambda d: d["stages"][1].update(device=d["stages"][0]["device"]),
        ["stages 0 and 1 are both on device", "schedule '1f1b' has them on two"],
    ),
    "two devices of a name": (
        lambda d: d["cluster"]["devices"][1].update(name="a"),
        ["cluster: device names must differ, got ['a', 'a', 'idle']"],
    ),
    "a link to nowhere": (
        lambda d: d["cluster"]["links"][0].update(between=["a", "z"]),
        ["cluster: a link joins 'z', the cluster has"],
    ),
    "a replica on too few devices": (
        lambda d: d.update(replica_devices=[["idle"]]),
        ["replica 1 of the model has 1 device, it needs one for each of the 2 stages"],
    ),
    "replicas on devices in use": (
        lambda d: d.update(replica_devices=[["idle", d["stages"][1]["device"]], ["cuda:0", "idle"]]),
        [
            "stages 1 and 1 of replica 1 are both on device",
            "replica 2 is on device 'cuda:0', the cluster has",
        ],
    ),
    "both stages of a replica on one device": (
        lambda d: d.update(replica_devices=[["idle", "idle"]]),
        ["stages 0 of replica 1 and 1 of replica 1 are both on device 'idle'"],
    ),
    "more replicas than micro-batches": (
        lambda d: d.update(replica_devices=[["idle", "none"]] * 4),
        [
            "replica 1 is on device 'none'",
            "replica 4 is on device 'none'",
            "5 replicas of the model cannot share 4 micro-batches",
        ],
    ),
    # schedule and numbers
    "chunks that the schedule has not": (
        lambda d: d.update(chunks=2),
        ["schedule '1f1b' does not exist for this plan: 1f1b needs chunks=1, got chunks=2"],
    ),
    "an order of a named schedule": (
        lambda d: d.update(actions=[["0F0"], ["1F0"]]),
        ["schedule '1f1b' determines its own actions"],
    ),
    "no order of a searched schedule": (
        lambda d: d.update(schedule="search"),
        ["known by its actions, and there are none"],
    ),
    "an order that lacks actions": (
        lambda d: d.update(schedule="search", actions=[["0F0", "0B0"], ["1F0"]]),
        ["does not exist for this plan"],
    ),
    "an unknown action": (
        lambda d: d.update(schedule="search", actions=[["0Q0"], ["1F0"]]),
        ["0Q0"],
    ),
    "micro-batches without costs": (
        lambda d: d.update(micro_batches=3),
        ["micro_batches is 3, and the costs in the plan are those of [4]: plan again"],
    ),
    # the form of the file
    "a later version": (
        lambda d: d.update(version=3),
        ["a Plan of version 3, and this pipepart reads version 2: update pipepart"],
    ),
    "an earlier version": (
        lambda d: d.update(version=1),
        ["a Plan of version 1, and this pipepart reads version 2: make it again"],
    ),
    "extra fields": (
        lambda d: (d.update(colour="blue"), d["stages"][1].update(speed=1), d["cluster"].update(size=3)),
        ["colour: Extra inputs", "stages.1.speed: Extra inputs", "cluster.size: Extra inputs"],
    ),
    # the profile inside
    "a speed that makes seconds endless": (
        lambda d: [device.update(speed=1e-320) for device in d["cluster"]["devices"]],
        ["holds a plan whose costs are too large", "forward_seconds: Input should be"],
    ),
    "costs of one number twice": (
        lambda d: d["profile"]["costs"].append(costs(d)),
        ["profile: there are two entries of costs for 4 micro-batches"],
    ),
    "sizes of too few micro-batches": (
        lambda d: costs(d).update(scale=[1.0, 1.0]),
        ["scale has 2 numbers for 4 micro-batches"],
    ),
    "memory kept by no layer": (
        lambda d: costs(d)["saved"][1].update(layers=[8], input_of=[-1]),
        ["profile: costs.0: saved.1 names layers [8, -1]: indices run from 0 to 7"],
    ),
    "sharing with no layer": (
        lambda d: d["profile"]["layers"][3].update(
            shared=[{"layer": "layer9", "name": "weight", "bytes": 0}]
        ),
        ["profile: layer 'layer3' shares with 'layer9', which is no layer before it"],
    ),
    "more trained than there is": (
        lambda d: d["profile"]["layers"][1].update(gradient_bytes=9),
        ["profile: layer 'layer1' has 9 bytes of gradients, which is more than its 4 bytes of parameters"],
    ),
    # several at once
    "layers, devices and schedule": (
        lambda d: (
            d["stages"][0]["layers"].append("more"),
            d["stages"][1]["layers"].pop(),
            d["stages"][1].update(device="nowhere"),
            d.update(schedule="zigzag"),
        ),
        [
            "stage 0 has layer 'more', which the model does not have",
            "layer 'layer7' is in no stage",
            "stage 1 is on device 'nowhere', the cluster has ['a', 'b', 'idle']",
            "no schedule is called 'zigzag': there are sequential, gpipe, 1f1b",
        ],
    ),
}


def swap_devices(data: Data) -> None:
    first, second = data["stages"][:2]
    first["device"], second["device"] = second["device"], first["device"]


# The same of the chunked plan.
CHUNKED_FAULTS: dict[str, tuple[Callable[[Data], object], list[str]]] = {
    "two stages of a row on two devices": (
        swap_devices,
        ["has stages 0 and 3 on one device", "has stages 1 and 2 on one device"],
    ),
    "a stage less": (
        lambda d: d["stages"][2]["layers"].extend(d["stages"].pop(3)["layers"]),
        ["3 stages are not 2 (chunks) for each device"],
    ),
}


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
