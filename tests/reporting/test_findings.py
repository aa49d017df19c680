"""The sentences on what limits a plan, their figures compared with plans that have the change."""

from __future__ import annotations

from collections.abc import Sequence

import schedules
from pipepart import Cluster, Plan, Profile, plan
from pipepart.capture import SharedTensor
from pipepart.planning.plans.stage_plan import StagePlan
from pipepart.reporting import findings
from pipepart.runtime.observe.trace import Trace
from tests.planning.problems import Layer, profile_of

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


def test_nothing_to_gain_is_said() -> None:
    profile = _profile([1.0, 1.0])
    made = plan(profile, Cluster.parse(["1GiB"]), schedule="sequential")
    assert findings(made) == (f"All stages are on {made.stages[0].device}: there is nothing to balance.",)
    made = plan(_profile([1.0, 1.0]), Cluster.parse(["1GiB"] * 2), schedule="auto")
    assert findings(made)[-1].startswith("No change of one keyword")


def test_what_no_plan_can_save_is_the_share_of_the_step_above_its_bound() -> None:
    made = plan(_profile([1.0, 0.4, 1.0]), Cluster.parse(["1GiB"] * 2), schedule="auto")
    share = 1 - made.step_bound / made.predicted.step_seconds
    assert share > 0.1
    assert findings(made)[-1] == (
        "No change of one keyword of the request gives a shorter step; no plan of as many micro-batches can save "
        f"more than {share:.0%}."
    )


def _tied() -> Profile:
    """Four layers of which the first and the last share a parameter."""
    profile = _profile([1.0] * 4)
    shared = (SharedTensor(layer="a", name="weight", bytes=0),)
    last = profile.layers[-1].model_copy(update={"shared": shared})
    return profile.model_copy(update={"layers": (*profile.layers[:-1], last)})


def test_shared_parameters_are_named_where_they_leave_devices_unused() -> None:
    tied, cluster = _tied(), Cluster.parse(["1GiB"] * 2)
    made, free = (plan(tied, cluster, schedule="1f1b", allow_split_ties=free) for free in (False, True))
    saved = 1 - free.predicted.step_seconds / made.predicted.step_seconds
    first, second = findings(made)
    assert first == f"All stages are on {made.stages[0].device}: 1 other device is unused."
    assert second == f"Planning again with `--allow-split-ties` would save {saved:.0%}, on 2 devices."


def test_sums_of_gradients_are_named_where_they_take_longest() -> None:
    cluster = Cluster.parse(["1GiB"] * 4, link="0.1MB/s")
    made = plan(_profile([1.0] * 4), cluster, schedule="1f1b", replicas=2)
    timeline = made.simulate()
    sums = [
        sum(end - start for action, start, end in row if action.kind is schedules.Kind.REDUCE_GRAD)
        for row in timeline.rows
    ]
    part = max(sums) / timeline.makespan
    assert part > 0.5
    assert findings(made)[1] == f"Adding up the gradients of 2 replicas takes {part:.0%} of the step."


def test_a_pipeline_that_gains_nothing_is_told() -> None:
    small = _profile([1e-6, 1e-6])  # each action of a virtual device costs 25 µs, and a message 20 µs
    made = _by_hand(small, ["a", "b"], Cluster.virtual(2))
    assert findings(made)[0].startswith("The pipeline gains nothing: a step of ")
    assert ", against 16 µs for the same micro-batches on one device" in findings(made)[0]


def test_a_trace_names_the_stage_that_takes_longer() -> None:
    profile, cluster = _profile([1.0, 1.0, 1.0, 1.0]), Cluster.parse(["1GiB"] * 2)
    made = _by_hand(profile, ["ab", "cd"], cluster)
    slow = schedules.simulate(
        made.build_schedule(), schedules.StageCosts([2 / 3, 1.0], [2 / 3] * 2, [2 / 3] * 2)
    )
    ratio = slow.makespan / made.predicted.step_seconds
    first, second, third = findings(made, Trace(made, [slow]))
    assert first == (
        f"Measured {slow.makespan:.2f} s a step, {ratio - 1:.0%} longer than predicted: each forward of stage 1 on "
        f"{cluster.devices[1].name} takes 1.50 times what was profiled."
    )
    assert "stage 1" in second.lower() or "bubble" in second
    assert third.endswith("replan with the trace.") or third.startswith("No change of one keyword")
