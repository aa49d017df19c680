"""Plans whose files are edited in tests: how, and the words that have to say what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipepart
from pipepart import Cluster, Device, Link, Plan
from pipepart.cluster import PairLink
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
    # schedule and numbers
    "chunks that the schedule has not": (
        lambda d: d.update(chunks=2),
        ["schedule '1f1b' does not exist for this plan: 1f1b needs chunks=1, got chunks=2"],
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
