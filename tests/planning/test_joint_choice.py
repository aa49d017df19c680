"""What "auto" takes is no slower than the best of everything that could be taken, each simulated."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Cluster, InfeasiblePlanError, Profile
from pipepart.planning.request import CHUNKS
from tests.planning.held import Held, held_by, moments, peak, step_of
from tests.planning.problems import Layer, chains, clusters, profile_of

MODES = ("never", "except-last", "always")
slow_data = [HealthCheck.too_slow]
pytestmark = pytest.mark.usefixtures("no_suggestions")


def every_step(layers: Sequence[Layer], cluster: Cluster, counts: Sequence[int]) -> Iterator[float]:
    """The simulated step of every schedule, micro-batch count, cut, order of the devices and recompute that fits."""
    for name, count in itertools.product(CHUNKS, counts):
        chunks = CHUNKS[name] or 1
        for devices in range(1, len(cluster) + 1):
            if devices * chunks > len(layers) or (chunks > 1 and devices == 1):
                continue
            try:
                bare = schedules.build(name, devices=devices, micro_batches=count, chunks=chunks)
            except schedules.ScheduleError:
                continue
            for inner in itertools.combinations(range(1, len(layers)), devices * chunks - 1):
                for order in itertools.permutations(range(len(cluster)), devices):
                    yield from steps_of(layers, cluster, bare, (0, *inner, len(layers)), order)


def steps_of(
    layers: Sequence[Layer],
    cluster: Cluster,
    bare: schedules.Schedule,
    edges: Sequence[int],
    order: Sequence[int],
) -> Iterator[float]:
    """The steps of one cut: of every choice of what each device makes again."""
    count = bare.micro_batches
    parts = [held_by(layers, *span) for span in itertools.pairwise(edges)]
    names = [cluster.devices[site].name for site in order]
    limited = any(cluster.devices[site].memory_bytes is not None for site in order)
    for modes in itertools.product(MODES if limited else MODES[:1], repeat=bare.devices):
        schedule = bare
        for mode, again in (("always", range(count)), ("except-last", range(count - 1))):
            chosen = [s for s, row in enumerate(bare.device_of) if modes[row] == mode and parts[s].backward]
            if chosen:
                schedule = schedules.insert_recompute(schedule, chosen, again)
        timeline = step_of(layers, edges, schedule, cluster, names)
        if all(fits(cluster, schedule, parts, row, site) for row, site in enumerate(order)):
            yield timeline.makespan


def fits(cluster: Cluster, schedule: schedules.Schedule, parts: list[Held], row: int, site: int) -> bool:
    limit = cluster.devices[site].memory_bytes
    own = {stage: parts[stage] for stage in schedule.stages_of(row)}
    return limit is None or peak(moments(schedule, row), own, {}) <= limit


def check(layers: Sequence[Layer], cluster: Cluster, counts: Sequence[int]) -> None:
    profile = profile_of(layers, counts)
    best = min(every_step(layers, cluster, counts), default=None)
    if best is None:
        with pytest.raises(InfeasiblePlanError):
            pipepart.plan(profile, cluster)
        return
    step = pipepart.plan(profile, cluster).predicted.step_seconds
    assert step <= best * (1 + 1e-9)
    assert pipepart.plan(profile, cluster, schedule="search").predicted.step_seconds == pytest.approx(step)


def trained(layers: Sequence[Layer]) -> list[Layer]:
    """With a parameter each, so that every stage sends a gradient back, as the simulation has it."""
    return [Layer(**{**vars(layer), "parameters": layer.parameters + 1, "trained": True}) for layer in layers]


problems = {"layers": chains(most=4).map(trained), "counts": st.sampled_from([(1,), (2,), (3,), (2, 4)])}


@given(cluster=clusters(most=3, limited=False, pairs=False), **problems)
@settings(max_examples=4, deadline=None, suppress_health_check=slow_data)
def test_no_choice_of_all_has_a_shorter_step(layers, cluster, counts):
    check(layers, cluster, counts)


@given(
    cluster=clusters(most=2, pairs=False),
    **{**problems, "layers": chains(most=3).map(trained)},
)
@settings(max_examples=2, deadline=None, suppress_health_check=slow_data)
def test_no_choice_of_all_that_fit_has_a_shorter_step(layers, cluster, counts):
    check(layers, cluster, counts)


@pytest.mark.slow
@given(
    cluster=clusters(most=3, pairs=False),
    **{**problems, "layers": chains(most=5).map(trained)},
)
@settings(max_examples=10, deadline=None, suppress_health_check=slow_data)
def test_no_choice_of_all_in_larger_problems_has_a_shorter_step(layers, cluster, counts):
    check(layers, cluster, counts)


def crowded(
    seed: int, least_size: int, most_size: int, host_link: float | None = None, keeps_input: bool = False
) -> tuple[Profile, Cluster]:
    """Sixteen layers on twelve unlike devices: most schedules do not fit, and the effort ends before all are tried."""
    draw = random.Random(seed)
    layers = [
        Layer(
            forward=draw.choice([0.5, 1, 2, 4]),
            parameters=draw.randint(1, 20),
            output=draw.randint(1, 20),
            saved=draw.randint(5, 40),
            waiting=draw.randint(0, 20),
            backward_weight=1,
            keeps_input=keeps_input,
        )
        for _ in range(16)
    ]
    size = draw.randint(least_size, most_size)
    texts = [f"{int(size * draw.choice([1, 0.8, 1.4]))}B@{draw.choice([1, 0.7, 0.5])}" for _ in range(12)]
    return profile_of(layers, [16]), Cluster.parse(texts, host_link=host_link)


def test_where_little_fits_auto_is_near_1f1b(monkeypatch):
    monkeypatch.setattr("pipepart.planning.planner.SECONDS", 600.0)  # on a slow machine, too
    profile, cluster = crowded(3, 150, 260, host_link=50.0)
    auto, named = (pipepart.plan(profile, cluster, schedule=name).predicted for name in ("auto", "1f1b"))
    assert auto.step_seconds <= 1.05 * named.step_seconds


@pytest.mark.parametrize("seed", [2, 31])  # the least step has twelve devices, and eleven
def test_where_one_micro_batch_at_a_time_fits_and_no_more_auto_fits(seed, monkeypatch):
    monkeypatch.setattr("pipepart.planning.planner.SECONDS", 600.0)  # on a slow machine, too
    profile, cluster = crowded(seed, 80, 150, keeps_input=True)
    with pytest.raises(InfeasiblePlanError):
        pipepart.plan(profile, cluster, schedule="1f1b")
    auto, named = (pipepart.plan(profile, cluster, schedule=name) for name in ("auto", "sequential"))
    assert auto.fits
    assert auto.predicted.step_seconds <= named.predicted.step_seconds
