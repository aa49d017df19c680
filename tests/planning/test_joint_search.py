"""The joint search: optima of tiny problems, published instances, constraints, and the order that its plan saves."""

import itertools
import math
import random
from statistics import mean

import pytest

import pipepart
import schedules
from benchmarks.layer_tables import PUBLISHED_STEP, published, table_profile
from pipepart import Cluster, Device, Link, Plan, Profile
from pipepart.planning.costs.step_bound import step_bound
from pipepart.planning.joint.annealing import Annealing
from pipepart.planning.joint.layout import OrderedLayout
from pipepart.planning.joint.search import search_jointly
from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.plans.searched_order import order_text
from pipepart.planning.request import read_request
from pipepart.planning.search.parts import Part, parts_of
from schedules.searching.allowance import Allowance
from schedules.searching.playing import peak_bytes, play
from tests.planning.exhaustive import Tiny, shortest_step
from tests.planning.problems import Layer, cluster_of, profile_of, with_unequal_sizes


def part_of(profile: Profile, cluster: Cluster, replicas: int = 1, **options) -> Part:
    """What `plan` with these options lets the joint search choose from."""
    request = read_request(profile, cluster, PlanOptions(replicas=replicas, **options))
    return next(parts_of(request))


def found_for(
    profile: Profile, cluster: Cluster, operations: int = 100_000, replicas: int = 1, **options
) -> Plan | None:
    """The plan of the joint search, with no plan to start from."""
    return search_jointly(part_of(profile, cluster, replicas, **options), [], Allowance(operations))


def drawn(draw: random.Random, layers: int, devices: int, micro_batches: int) -> Tiny:
    def numbers(*choices: int) -> list[int]:
        return [draw.choice(choices) for _ in range(layers)]

    saved = numbers(1, 2, 3)
    transfers = draw.random() < 0.5  # what is sent needs memory, so there is a limit only where nothing is
    limit = sum(saved) + draw.randint(0, 2) * max(saved)
    return Tiny(
        numbers(1, 2, 3, 5),
        numbers(1, 2, 4, 6),
        numbers(0, 0, 1, 3, 5),
        numbers(0, 1, 3) if transfers else [0] * layers,
        [draw.choice((1, 1, 0.5)) for _ in range(devices)],
        micro_batches,
        saved,
        math.inf if transfers else limit,
    )


def gap(tiny: Tiny) -> float:
    """How much longer the step of the joint search is than the shortest."""
    m = tiny.micro_batches
    parts = zip(
        tiny.forward, tiny.backward_input, tiny.backward_weight, tiny.transfer, tiny.saved, strict=True
    )
    layers = [
        Layer(f * m, i * m, w * m, output=size, saved=saved, waiting=saved) for f, i, w, size, saved in parts
    ]
    memory = None if tiny.memory == math.inf else int(tiny.memory)
    named = [
        Device(name=f"d{at}", kind="x", speed=s, memory_bytes=memory) for at, s in enumerate(tiny.speeds)
    ]
    cluster = Cluster(devices=tuple(named), link=Link(bandwidth=1.0))
    plan = found_for(profile_of(layers, [m]), cluster, operations=300_000, recompute="never")
    assert plan is not None
    step = plan.predicted.step_seconds
    best = shortest_step(tiny, step)
    assert best is not None, f"a step of {step} s is shorter than possible: {tiny}"
    (costs,) = profile_of(layers, [m]).costs
    assert step_bound(costs, tiny.speeds) <= best * (1 + 1e-9), f"no bound: {tiny}"
    return step / best - 1


def test_tiny_problems_are_solved():
    draw = random.Random(1)
    for size in ((2, 2, 3), (3, 3, 2), (3, 3, 3), (4, 3, 2)):
        assert gap(drawn(draw, *size)) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_small_problems_are_solved_within_half_a_percent():
    draw = random.Random(2)
    sizes = [(draw.randint(3, 4), draw.randint(2, 3), draw.randint(1, 3)) for _ in range(30)]
    gaps = [gap(drawn(draw, *size)) for size in sizes]
    assert mean(gaps) <= 0.005
    assert max(gaps) <= 0.03


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 7, 9, 11, 13])
def test_a_layout_is_judged_as_its_plan_is_simulated(seed, unequal):
    """Under odd seeds in memory so tight that stages recompute and messages may not wait."""
    draw = random.Random(seed)
    count, m = draw.randint(4, 10), draw.randint(1, 6)
    layers = [
        Layer(
            draw.random() * m,
            draw.random() * m,
            draw.random() * m,
            parameters=draw.randint(1, 5),
            output=draw.choice((0, 1, 3)),
            peak=draw.randint(0, 3),
            saved=draw.randint(0, 6),
            waiting=draw.randint(0, 4),
            split=draw.choice((0.1, 0, -0.05)) * m if seed % 2 else None,
        )
        for _ in range(count)
    ]
    cluster = Cluster(
        devices=tuple(
            Device(
                name=f"device:{at}",
                kind="made up",
                speed=draw.choice((1, 0.5)),
                action_seconds=(0, 0.1)[seed % 2],
                memory_bytes=(None, 80 + 20 * (seed % 5))[seed % 2],
            )
            for at in range(3)
        ),
        link=Link(bandwidth=draw.choice((None, 4.0)), latency=draw.choice((0, 0.05))),
    )
    profile = profile_of(layers, [m])
    part = part_of(with_unequal_sizes(profile) if unequal else profile, cluster)
    annealing = Annealing(part, Allowance(20_000), random.Random(0))
    annealing.run([])
    for ordered in annealing.distinct(3):
        order, layout = ordered.problem.schedule_of("search", ordered.rows), ordered.layout
        plan = part.plan_of(
            layout.borders,
            layout.devices,
            layout.modes,
            schedule="search",
            actions=order_text(order),
        )
        assert plan.fits
        assert plan.predicted.step_seconds == pytest.approx(ordered.seconds)
        assert max(play(ordered.problem, ordered.rows) or ()) == pytest.approx(ordered.seconds)
        if ordered.problem.memory is not None:
            check_memory(plan, ordered)


def check_memory(plan: Plan, ordered: OrderedLayout) -> None:
    """The search counts the bytes that the plan needs in its own simulated step."""
    memory = ordered.problem.memory
    ends = play(ordered.problem, ordered.rows)
    assert memory is not None
    assert ends is not None
    needs = plan.device_bytes(plan.simulate())
    peaks = zip(peak_bytes(ordered.problem, ordered.rows, ends), memory.limit, strict=True)
    for device, (peak, limit) in zip(plan.cluster.devices, peaks, strict=True):
        if device.name in needs:
            assert peak + (device.memory_bytes or 0) - limit == pytest.approx(needs[device.name])


LAYERS = [
    Layer(1 + i % 3, 1 + i % 2, backward_weight=1, parameters=3, output=5, saved=10, waiting=4)
    for i in range(10)
]


def test_stages_offload_if_the_link_to_the_host_is_fast():
    """Six devices with room for four stashes each."""
    profile = profile_of([Layer(16.0, 16.0, 16.0, output=10, saved=100)] * 6, [8])
    fast, slow = (Cluster.parse(["420B"] * 6, host_link=link) for link in (1e6, 0.1))
    keeps, offloads = (found_for(profile, one, operations=15_000) for one in (slow, fast))
    assert keeps is not None
    assert offloads is not None
    assert offloads.fits
    assert {stage.mode for stage in keeps.stages} == {"never"}
    assert "offload" in {stage.mode for stage in offloads.stages}
    assert offloads.predicted.step_seconds < 0.9 * keeps.predicted.step_seconds


def test_the_search_keeps_to_its_operations():
    """Also where it starts from all 128 placements of eight layers."""
    allowance = Allowance(20_000)
    Annealing(part_of(profile_of(LAYERS[:8], [4]), cluster_of(1, 1)), allowance, random.Random(0)).run([])
    assert 10_000 < allowance.used < 21_000


def test_too_many_devices_or_micro_batches_are_left_to_named_schedules():
    profile = profile_of([Layer()] * 200, [4])
    assert found_for(profile, cluster_of(*[1] * 129), operations=10**9) is None
    assert found_for(profile, cluster_of(*[1] * 128), operations=40 * 3 * 4 * 128 - 1) is None


def test_1f1b_on_an_even_cut_takes_what_was_published():
    plan = pipepart.plan(
        published(),
        Cluster.parse(["80GiB"] * 4),
        schedule="1f1b",
        cut_before=["layer15", "layer29", "layer43"],
    )
    assert plan.predicted.step_seconds == pytest.approx(133_121)


def test_the_joint_search_beats_the_published_plan():
    plan = found_for(published(), Cluster.parse(["80GiB"] * 4), operations=400_000)
    assert plan is not None
    assert plan.predicted.step_seconds <= 89_500 < PUBLISHED_STEP


def test_a_small_joint_optimum_is_found():
    """SlackPipe's case: 4 micro-batches, 8 unit layers, forward and backward alike, 2 devices."""
    profile = table_profile([(1, 1, 0)] * 8, micro_batches=4)
    plan = found_for(profile, Cluster.parse(["80GiB"] * 2))
    assert plan is not None
    assert plan.predicted.step_seconds == pytest.approx(34)


@pytest.fixture(scope="module")
def searched() -> Plan:
    return pipepart.plan(profile_of(LAYERS, [6]), Cluster.parse(["1GiB"] * 3, link=100.0), schedule="search")


def test_fewer_micro_batches_have_the_same_order_without_the_others(searched):
    fewer = searched.build_schedule(2)
    assert fewer.micro_batches == 2
    schedules.check(fewer)
    with pytest.raises(schedules.ScheduleError, match="searched for 6 micro-batches, there is none for 7"):
        searched.build_schedule(7)


@pytest.mark.parametrize("step", [0.0, 1000.0], ids=["clock stands still", "each look takes 1,000 s"])
def test_a_plan_says_whether_its_time_was_up(monkeypatch, step):
    moments = itertools.count(0.0, step)
    monkeypatch.setattr("schedules.searching.clock.time.monotonic", lambda: next(moments))
    plan = pipepart.plan(profile_of(LAYERS, [6]), Cluster.parse(["1GiB"] * 3, link=100.0))
    assert plan.out_of_time == (step > 0)
