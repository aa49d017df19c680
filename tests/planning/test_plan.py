"""What is chosen among schedules, cuts and orders of devices: "auto" is no slower than all that could be taken."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Cluster, InfeasiblePlanError, Link, Plan, Profile
from pipepart.graph_partition.device_orders import distinct_orders
from pipepart.planning import StagePlan
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
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


EQUAL = [Layer(forward=1, backward_input=1, backward_weight=1)] * 8


def test_a_slow_device_is_left_out_and_named():
    cluster = Cluster.parse(["1GiB", "1GiB@0.05", "1GiB"])
    plan = pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b")
    assert [stage.device for stage in plan.stages] == ["device:0", "device:2"]
    assert plan.unused_devices == ("device:1",)
    assert str(plan).splitlines()[-1] == "  without device:1: the step would not be shorter"
    assert len(pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b", stages=3).stages) == 3


def test_a_plan_by_hand_has_no_prediction():
    stage = StagePlan(layers=("a",), device="virtual:0")
    plan = Plan(stages=(stage,), cluster=Cluster.virtual(1), schedule="1f1b", micro_batches=1)
    with pytest.raises(ValueError, match="no prediction"):
        _ = plan.predicted


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_named_schedule_is_no_slower_than_any_cut_of_it(name):
    """Few micro-batches and unequal layers: the smallest bottleneck has not the shortest step."""
    layers = [
        Layer(forward=cost, backward_input=2 * cost, parameters=1, output=cost) for cost in (1, 5, 2, 4, 1)
    ]
    profile = profile_of(layers, [2])
    cluster = Cluster(devices=Cluster.virtual(2).devices, link=Link(bandwidth=1.0))
    plan = pipepart.plan(profile, cluster, schedule=name)
    cuts = [pipepart.plan(profile, cluster, schedule=name, cut_before=[f"layer{i}"]) for i in range(1, 5)]
    assert plan.predicted.step_seconds == min(cut.predicted.step_seconds for cut in cuts)


def test_what_changes_the_numbers_or_takes_two_copies_is_planned_only_if_named():
    assert not {*CHUNKS} & {*ASYNCHRONOUS, "chimera"}


@pytest.mark.timeout(30)
def test_few_layers_on_many_devices_have_a_plan():
    profile = profile_of([Layer(output=10)] * 14, [8])
    plan = pipepart.plan(profile, Cluster.virtual(16), seconds=0.3)
    assert plan.predicted.step_seconds < plan.predicted.serial_seconds


def test_devices_with_other_runtimes_are_not_alike():
    cluster = Cluster.virtual(2)
    slow = cluster.devices[1].model_copy(update={"action_seconds": 0.5})
    cluster = cluster.model_copy(update={"devices": (cluster.devices[0], slow)})
    assert list(distinct_orders(cluster, 2)) == [(0, 1), (1, 0)]


def test_layers_that_share_a_parameter_stay_together_unless_they_may_be_parted():
    tied, cluster = profile_of([Layer(), Layer(), Layer(shares_with=(0,))]), Cluster.virtual(2)
    assert len(pipepart.plan(tied, cluster, schedule="1f1b").stages) == 1
    assert len(pipepart.plan(tied, cluster, schedule="1f1b", allow_split_ties=True).stages) == 2
    with pytest.raises(InfeasiblePlanError, match="no cut into 2 stages is possible"):
        pipepart.plan(tied, cluster, stages=2)


def test_they_stay_together_where_a_cut_into_as_many_stages_keeps_them():
    layers = [Layer(), Layer(), Layer(forward=9), Layer(shares_with=(1,)), Layer()]
    for allow_split_ties in (False, True):
        plan = pipepart.plan(
            profile_of(layers), Cluster.virtual(3), schedule="1f1b", allow_split_ties=allow_split_ties
        )
        assert [len(stage.layers) for stage in plan.stages] == [1, 3, 1]


@pytest.mark.parametrize("seed", range(2))
def test_the_joint_search_splits_no_tie_that_as_many_stages_keep_together(seed):
    pick = random.Random(seed)
    layers = [Layer(forward=pick.uniform(0.5, 2), output=5) for _ in range(8)]
    layers[4] = Layer(forward=1, output=5, shares_with=(2,))
    plan = pipepart.plan(profile_of(layers, [8]), Cluster.virtual(2), allow_split_ties=True)
    (together,) = [stage for stage in plan.stages if "layer4" in stage.layers]
    assert len(plan.stages) > 6 or "layer2" in together.layers
