"""Plans whose files are edited in tests, and how."""

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
