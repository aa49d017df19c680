"""The sentences on what limits a plan, with the figures of plans that have the change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import schedules
from pipepart import Cluster, Plan, Profile, plan
from pipepart.capture import SharedTensor
from pipepart.planning.plans.stage_plan import StagePlan
from pipepart.reporting import findings
from pipepart.runtime.observe.trace import Trace
from tests.planning.problems import Layer, profile_of
from tests.support.golden import check_golden

MIB = 2**20


def _profile(seconds: Sequence[float], count: int = 8, batch: int = 8) -> Profile:
    """Layers named a, b, c ... of 1 MiB, and their seconds for one micro-batch."""
    parts = [count * each / 3 for each in seconds]
    layers = [Layer(part, part, part, parameters=MIB, saved=MIB) for part in parts]
    return profile_of(layers, [count], optimizer="sgd", names="abcdefgh", batch=batch)


def _by_hand(profile: Profile, cut: Sequence[str], cluster: Cluster, schedule: str = "1f1b") -> Plan:
    stages = tuple(
        StagePlan(layers=tuple(layers), device=device.name)
        for layers, device in zip(cut, cluster.devices, strict=True)
    )
    count = profile.costs[0].micro_batches
    made = Plan(stages=stages, cluster=cluster, schedule=schedule, micro_batches=count, profile=profile)
    return made.predict()


def test_an_uneven_cut_names_the_bottleneck_and_what_another_plan_saves() -> None:
    profile, cluster = _profile([1.0, 1.0, 1.0, 1.0]), Cluster.parse(["1GiB"] * 2)
    uneven, even = (_by_hand(profile, cut, cluster, "zb-h1") for cut in (["abc", "d"], ["ab", "cd"]))
    saved = 1 - even.predicted.step_seconds / uneven.predicted.step_seconds
    name = cluster.devices[0].name
    assert findings(uneven) == (
        f"Stage 0 on {name} is the bottleneck, 50% over the mean of the devices.",
        f"Planning again would save {saved:.0%}.",
    )


def test_a_long_bubble_asks_for_more_micro_batches() -> None:
    profile = _profile([1.0] * 4, count=4, batch=16)
    made = _by_hand(profile, ["a", "b", "c", "d"], Cluster.parse(["1GiB"] * 4), "zb-h1")
    small, more = schedules.build("zb-h1", 4, 4), schedules.build("zb-h1", 4, 16)
    costs = [schedules.StageCosts([each / 3] * 4, [each / 3] * 4, [each / 3] * 4) for each in (1.0, 0.25)]
    before, after = (
        schedules.simulate(one, cost).makespan for one, cost in zip((small, more), costs, strict=True)
    )
    assert findings(made) == (
        f"The bubble is {1 - 4 / before:.0%} of the step: devices wait while the pipeline fills and drains.",
        f"Planning again with `--micro-batches 16 --estimate` would save {1 - after / before:.0%}, if times are in "
        "proportion to the samples: profile that number.",
    )


def _tied() -> Profile:
    """Four layers of which the first and the last share a parameter."""
    profile = _profile([1.0] * 4)
    shared = (SharedTensor(layer="a", name="weight", bytes=0),)
    last = profile.layers[-1].model_copy(update={"shared": shared})
    return profile.model_copy(update={"layers": (*profile.layers[:-1], last)})


def _slow_second_stage(made: Plan) -> Trace:
    costs = schedules.StageCosts([2 / 3, 1.0], [2 / 3] * 2, [2 / 3] * 2)
    return Trace(made, [schedules.simulate(made.build_schedule(), costs)])


def _late(made: Plan) -> Trace:
    """A step each of whose actions starts half a second later behind the one before."""
    step = made.simulate()
    starts, ends = (
        [[time + at / 2 for at, time in enumerate(row)] for row in rows] for rows in (step.starts, step.ends)
    )
    return Trace(made, [schedules.Timeline(step.schedule, starts, ends)])


def test_what_there_is_to_find_is_said_as_the_file_has_it() -> None:
    """Each action of a virtual device costs 25 µs, and a message 20 µs."""
    one, two = (Cluster.parse(["1GiB"] * count) for count in (1, 2))
    four = Cluster.parse(["1GiB"] * 4, link="0.1MB/s")
    even = _by_hand(_profile([1.0] * 4), ["ab", "cd"], two)
    found = {
        "one device": findings(plan(_profile([1.0, 1.0]), one, schedule="sequential")),
        "nothing to gain": findings(plan(_profile([1.0, 1.0]), two)),
        "a bound below the step": findings(plan(_profile([1.0, 0.4, 1.0]), two)),
        "shared parameters": findings(plan(_tied(), two, schedule="1f1b")),
        "long sums of gradients": findings(plan(_profile([1.0] * 4), four, schedule="1f1b", replicas=2)),
        "short layers": findings(_by_hand(_profile([1e-6, 1e-6]), ["a", "b"], Cluster.virtual(2))),
        "nothing is lost": findings(_by_hand(_profile([1.0] * 2, count=64), ["a", "b"], two)),
        "a second stage that is slower than profiled": findings(even, _slow_second_stage(even)),
        "late actions": findings(even, _late(even)),
    }
    texts = ["\n".join([f"# {name}", *sentences, ""]) for name, sentences in found.items()]
    check_golden("\n".join(texts), Path(__file__).parent / "golden" / "findings.txt")
