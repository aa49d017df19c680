"""Whatever is asked of the planner, in contradictions too, it answers with a sound plan or says what is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

import pipepart
import schedules
from pipepart import Cluster, Device, Link, Plan, Profile
from pipepart.cluster import PairLink
from pipepart.planning.request import ASYNCHRONOUS, BIDIRECTIONAL, CHUNKS
from pipepart.reporting import plan_reports
from tests.planning.problems import Layer, profile_of, with_unequal_sizes, with_values
from tests.support.seeds import seeds


@dataclass(frozen=True)
class Request:
    """The arguments of one call of ``plan``."""

    profile: Profile
    cluster: Cluster
    options: dict[str, Any]


def drawn_request(seed: int, most_layers: int = 8, most_devices: int = 3) -> Request:
    """A chain, or a chain with values that skip layers, on devices that may be unlike or far too small."""
    choose = random.Random(seed)
    layers = _layers(choose, choose.randint(1, most_layers))
    counts = sorted(choose.sample([1, 2, 3, 4, 8], choose.randint(1, 2)))
    kind = choose.choice(["chain", "skips"]) if len(layers) > 2 else "chain"
    profile = profile_of(layers, counts, choose.choice([0.0, 3.0]), optimizer=choose.choice(["sgd", "adam"]))
    if kind == "skips":
        values = [(choose.randint(1, 50), _some_of(choose, len(layers))) for _ in range(choose.randint(1, 5))]
        profile = with_values(profile, values)
    elif choose.random() < 0.3:
        profile = with_unequal_sizes(profile)
    needed = sum(4 * layer.parameters + layer.saved + layer.output for layer in layers) + 50
    cluster = _cluster(choose, choose.randint(1, most_devices), needed)
    return Request(profile, cluster, _options(choose, len(layers), len(cluster), counts))


def _some_of(choose: random.Random, layers: int) -> tuple[int, ...]:
    return tuple(sorted(choose.sample(range(layers), choose.randint(2, min(4, layers)))))


def _layers(choose: random.Random, count: int) -> list[Layer]:
    """Layers whose seconds are equal, full of zeros and ties, or of which the first takes nearly all."""
    style = choose.choice(["any", "equal", "zeros", "one is huge", "ties"])
    split = choose.choice([None, 0.0, 0.3, -0.3, -2.0])

    def seconds() -> float:
        values = {"equal": 1.0, "zeros": choose.choice([0.0, 0.0, 1.0]), "ties": float(choose.randint(0, 2))}
        return values.get(style, choose.uniform(0, 9))

    def size() -> int:
        return choose.choice([0, choose.randint(0, 50), 10**9 if choose.random() < 0.1 else 1])

    layers = []
    for index in range(count):
        layer = Layer(
            forward=seconds(),
            backward_input=seconds(),
            backward_weight=seconds(),
            parameters=size(),
            trained=choose.random() < 0.8,
            output=size(),
            peak=choose.randint(0, 50),
            saved=size(),
            waiting=choose.randint(0, 50),
            keeps_input=choose.random() < 0.5,
            shares_with=(choose.randrange(index),) if index and choose.random() < 0.05 else (),
        )
        if style == "one is huge" and not index:
            layer = replace(layer, forward=5000.0)
        backward = layer.backward_input + layer.backward_weight
        layers.append(replace(layer, split=None if split is None else split * backward))
    return layers


def _cluster(choose: random.Random, count: int, needed: int) -> Cluster:
    memory = choose.choice([None, None, needed, needed // 2 + 1, 1])
    if choose.random() < 0.15:
        return Cluster.parse(
            [f"{memory or needed}B"], hosts=2, devices_per_host=count, link="100B/s", network="10B/s"
        )
    unlike = choose.random() < 0.5
    host = choose.choice([None, 20.0])
    devices = tuple(
        Device(
            name=f"d{index}",
            kind="made up",
            speed=10 ** choose.uniform(-2, 1) if unlike else 1.0,
            memory_bytes=memory if choose.random() < 0.8 else None,
            host_bandwidth=host,
        )
        for index in range(count)
    )
    link = choose.choice([Link(), Link(bandwidth=1000.0), Link(bandwidth=1.0, latency=0.5)])
    slow = (PairLink(between=("d0", "d1"), bandwidth=5.0, latency=1.0),)
    return Cluster(devices=devices, link=link, links=slow if count > 1 and choose.random() < 0.2 else ())


def _options(choose: random.Random, layers: int, devices: int, counts: list[int]) -> dict[str, Any]:
    """One or two constraints of any kind, or none; many contradict each other."""
    names = [f"layer{index}" for index in range(layers)]
    any_of: dict[str, Any] = {
        "micro_batches": choose.choice(counts),
        "recompute": choose.choice(["never", "except-last", "always"]),
        "offload": choose.choice(["never", "stash"]),
        "schedule": choose.choice([*CHUNKS, *ASYNCHRONOUS, *BIDIRECTIONAL, "search"]),
        "stages": choose.randint(1, min(layers, 2 * devices)),
        "chunks": choose.randint(1, 3),
        "replicas": choose.choice(["auto", 2]),
        "colocate": [choose.sample(names, min(2, layers))],
        "cut_before": [f"layer{i}" for i in sorted(choose.sample(range(1, layers), min(2, layers - 1)))],
        "allow_split_ties": True,
        "reduction": choose.choice(["mean", "batch"]),
    }
    return {name: any_of[name] for name in choose.sample(list(any_of), choose.choice([0, 0, 1, 1, 2]))}


def planned(request: Request, **changes: Any) -> Plan | ValueError:
    """The plan, or the error with which it is refused.

    Time stands still meanwhile: what a search finds in a number of operations does not depend on the machine.
    """
    with patch("schedules.searching.clock.time.monotonic", return_value=0.0):
        try:
            return pipepart.plan(request.profile, request.cluster, **{**request.options, **changes})
        except ValueError as error:
            return error


def check(seed: int, folder: Path) -> None:
    request = drawn_request(seed)
    plan = planned(request)
    if isinstance(plan, ValueError):
        assert len(str(plan)) > 20, "says too little"
        assert str(planned(request)) == str(plan)
        return
    assert planned(request) == plan
    assert_sound(plan, request)
    assert_kept(plan, request)
    plan.save(folder / "plan.json")
    assert Plan.load(folder / "plan.json") == plan
    console = Console(width=100)
    with console.capture() as shown:
        for report in plan_reports(plan):
            console.print(report)
    assert f"{plan.micro_batches}" in shown.get()
    assert "stage 0" in str(plan)


def assert_sound(plan: Plan, request: Request) -> None:
    """Assert that the schedule is legal, and that the prediction is its simulation, above the bound, and fits."""
    schedules.check(plan.build_schedule())
    step = plan.simulate()
    assert plan.step_bound <= plan.predicted.step_seconds * (1 + 1e-9)
    assert plan.predicted.step_seconds == step.makespan
    assert plan.predict().predicted.step_seconds == plan.predicted.step_seconds
    assert plan.predicted.bottleneck_bound <= plan.predicted.bottleneck_seconds * (1 + 1e-9)
    assert [name for stage in plan.stages for name in stage.layers] == [
        layer.name for layer in request.profile.layers
    ]
    assert plan.fits
    predicted = dict(zip(request.cluster.devices, plan.predicted.memory_bytes, strict=True))
    assert all(
        device.memory_bytes is None or need <= device.memory_bytes for device, need in predicted.items()
    )
    needs = {device.name: need for device, need in predicted.items() if need}
    assert {name: need for name, need in plan.device_bytes().items() if need} == needs
    of_step = plan.device_bytes(step)
    assert all(need <= needs.get(name, 0) for name, need in of_step.items())
    if (least := max(of_step.values())) > 1:  # with a byte less than its own step needs, a plan does not fit
        assert not plan.model_copy(update={"cluster": plan.cluster.with_memory(least - 1)}).predict().fits


def assert_kept(plan: Plan, request: Request) -> None:
    """Assert that the plan keeps every constraint."""
    asked = request.options
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    firsts = [stage.layers[0] for stage in plan.stages[1:]]
    assert all(len({stage_of[name] for name in group}) == 1 for group in asked.get("colocate", ()))
    assert firsts == list(asked.get("cut_before", firsts))
    assert len(plan.stages) == asked.get("stages", len(plan.stages))
    assert plan.micro_batches == asked.get("micro_batches", plan.micro_batches)
    assert plan.schedule == asked.get("schedule", plan.schedule)
    assert plan.schedule == "search" or plan.chunks == asked.get("chunks", plan.chunks)
    assert asked.get("replicas") == "auto" or plan.replicas == asked.get("replicas", 1)
    if "recompute" in asked:
        assert {stage.recompute for stage in plan.stages if stage.backward_seconds} <= {asked["recompute"]}
    if not asked.get("allow_split_ties"):
        for layer in request.profile.layers:
            assert all(stage_of[owner] == stage_of[layer.name] for owner in layer.shares_with)


@pytest.mark.parametrize("seed", range(10))
def test_a_sound_plan_or_an_error(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_a_sound_plan_or_an_error_for_many(block, tmp_path):
    for seed in seeds(25, f"hostile plans {block}"):
        check(seed, tmp_path)


@pytest.mark.slow
def test_plans_are_the_same_in_every_process():
    """Whatever the order of sets there."""
    code = (
        "from tests.planning.test_hostile import Plan, drawn_request, planned\n"
        "for made in map(planned, map(drawn_request, range(8))):\n"
        "    print(made.model_dump_json() if isinstance(made, Plan) else made)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(said) == 1
