"""The joint search against the optimum of tiny problems, and its judgement of layouts against the simulation."""

import math
import random
from statistics import mean

import pytest

from pipepart import Cluster, Device, Link, Plan
from pipepart.planning.joint.annealing import Annealing
from pipepart.planning.joint.layout import OrderedLayout
from pipepart.planning.joint.to_plan import plan_of
from schedules.searching.allowance import Allowance
from schedules.searching.dispatching import play_rows
from tests.planning.exhaustive import Tiny, shortest_step
from tests.planning.joint_requests import found_for, joint_request
from tests.planning.problems import Layer, profile_of


def drawn(draw: random.Random, layers: int, devices: int, micro_batches: int) -> Tiny:
    def numbers(*choices: int) -> list[int]:
        return [draw.choice(choices) for _ in range(layers)]

    saved = numbers(1, 2, 3)
    transfers = (
        draw.random() < 0.5
    )  # what is sent needs memory, too, so there is a limit only where nothing is
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
    cluster = Cluster(
        devices=tuple(
            Device(
                name=f"device:{at}",
                kind="made up",
                speed=speed,
                memory_bytes=None if tiny.memory == math.inf else int(tiny.memory),
            )
            for at, speed in enumerate(tiny.speeds)
        ),
        link=Link(bandwidth=1.0),
    )
    plan = found_for(profile_of(layers, [m]), cluster, operations=300_000, recompute="never")
    assert plan is not None
    step = plan.predicted.step_seconds
    best = shortest_step(tiny, step)
    assert best is not None, f"a step of {step} s is shorter than possible: {tiny}"
    return step / best - 1


def test_tiny_problems_are_solved():
    draw = random.Random(1)
    for size in ((2, 2, 3), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 2, 2), (4, 3, 2)):
        assert gap(drawn(draw, *size)) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_small_problems_are_solved_within_half_a_percent():
    draw = random.Random(2)
    sizes = [(draw.randint(3, 4), draw.randint(2, 3), draw.randint(1, 3)) for _ in range(30)]
    gaps = [gap(drawn(draw, *size)) for size in sizes]
    assert mean(gaps) <= 0.005
    assert max(gaps) <= 0.03


@pytest.mark.parametrize("seed", range(6))
def test_a_layout_is_judged_as_its_plan_is_simulated(seed):
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
                memory_bytes=(None, 160)[seed % 2],
            )
            for at in range(3)
        ),
        link=Link(bandwidth=draw.choice((None, 4.0)), latency=draw.choice((0, 0.05))),
    )
    request = joint_request(profile_of(layers, [m]), cluster)
    annealing = Annealing(request, Allowance(20_000), random.Random(0))
    annealing.run([])
    for ordered in annealing.distinct(3):
        plan = plan_of(request, ordered.layout, ordered.problem.schedule_of("search", ordered.rows))
        assert plan is not None
        assert plan.predicted.step_seconds == pytest.approx(ordered.seconds)
        if ordered.problem.memory is not None:
            check_memory(plan, ordered)


def check_memory(plan: Plan, ordered: OrderedLayout) -> None:
    """The search counts the bytes that the plan needs in its own simulated step."""
    memory = ordered.problem.memory
    ends = play_rows(ordered.problem, ordered.rows)
    assert memory is not None
    assert ends is not None
    needs = plan.device_bytes(plan.simulate())
    peaks = zip(ordered.problem.peak_bytes(ordered.rows, ends), memory.limit, strict=True)
    for device, (peak, limit) in zip(plan.cluster.devices, peaks, strict=True):
        if device.name in needs:
            assert peak + (device.memory_bytes or 0) - limit == pytest.approx(needs[device.name])
