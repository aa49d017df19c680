"""Backwards that run in two parts so that their gradient leaves early: the same work, never longer, often shorter."""

from collections import Counter
from random import Random

import pytest

from schedules import (
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    bound,
    build,
    check,
    fuse_backward,
    search,
    simulate,
    split_backward,
    split_critical,
)

NAMES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager-1f1b", 1),
    ("sequential", 1),
    ("interleaved-1f1b", 2),
    ("hanayo", 2),
]


def random_costs(stages: int, seed: int) -> StageCosts:
    draw = Random(seed)
    inputs, weights = ([draw.uniform(0.5, 2) for _ in range(stages)] for _ in range(2))
    whole = [(i + w) * draw.uniform(0.8, 1.1) for i, w in zip(inputs, weights, strict=True)]
    return StageCosts(
        [draw.uniform(0.5, 2) for _ in range(stages)],
        inputs,
        weights,
        backward=whole,
        latency=draw.choice([0.0, 0.2]),
        stash_bytes=[draw.uniform(1, 3) for _ in range(stages)],
        weight_stash_bytes=[draw.uniform(1, 4) for _ in range(stages)],
    )


def kinds(schedule: Schedule) -> Counter[Kind]:
    return Counter(action.kind for row in schedule.actions for action in row)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_equal_stages_save_a_weight_gradient_at_each_border(p: int, m: int) -> None:
    costs = StageCosts([1.0] * p, [1.0] * p, [1.0] * p)
    early = split_critical(build("1f1b", p, m), costs)
    assert simulate(early, costs).makespan == 3 * (m + p - 1) - (p - 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_the_order_of_the_work_is_the_same_and_never_takes_longer(name: str, chunks: int, seed: int) -> None:
    schedule = build(name, 4, 8, chunks)
    costs = random_costs(schedule.stages, seed)
    early = split_critical(schedule, costs)
    check(early)
    assert fuse_backward(early).actions == schedule.actions
    assert simulate(early, costs).makespan <= simulate(schedule, costs).makespan


def test_where_the_parts_take_longer_only_the_last_is_split() -> None:
    costs = StageCosts([1, 2], [1.2, 2.4], [1, 2], backward=[2, 4])
    early = split_critical(build("1f1b", 2, 6), costs)
    assert kinds(early)[Kind.W] == 1
    assert [str(action) for action in early.actions[1][-2:]] == ["1I5", "1W5"]


def test_where_the_parts_take_less_all_are_split() -> None:
    costs = StageCosts([1, 1], [1, 1], [0.5, 0.5], backward=[2, 2])
    assert kinds(split_critical(build("1f1b", 2, 6), costs))[Kind.B] == 0


def test_where_nothing_is_gained_the_schedule_comes_back() -> None:
    one = build("1f1b", 1, 4)
    assert split_critical(one, StageCosts([1], [1], [1])) is one
    two = build("1f1b", 2, 4)
    assert split_critical(two, StageCosts([1, 1], [3, 3], [1, 1], backward=[2, 2])) is two
    behind = build("pipedream", 2, 4)
    assert split_critical(behind, StageCosts([1, 1], [1, 1], [1, 1])) is behind


def test_memory_is_kept_to() -> None:
    costs = StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[2, 2], weight_stash_bytes=[2, 5])
    schedule = build("1f1b", 2, 4)
    assert kinds(split_critical(schedule, costs, memory=[4, 5]))[Kind.W] == 1
    assert split_critical(schedule, costs, memory=[4, 4]) is schedule


def test_a_full_backward_costs_what_it_is_said_to() -> None:
    costs = StageCosts([1, 1], [1, 1], [1, 1], backward=[1.5, 1.75])
    schedule = build("gpipe", 2, 1)
    assert simulate(schedule, costs).makespan == 1 + 1 + 1.75 + 1.5
    assert simulate(split_backward(schedule), costs).makespan == 1 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_the_bound_where_a_full_backward_is_cheaper_than_its_parts(seed: int) -> None:
    costs = random_costs(4, seed)
    least = bound(costs, 4, 8, placement=range(4))
    for schedule in [
        build("1f1b", 4, 8),
        build("gpipe", 4, 8),
        build("zb-h1", 4, 8),
        search(costs, 4, 8, effort=0.05),
    ]:
        if schedule.device_of == (0, 1, 2, 3):
            assert simulate(schedule, costs).makespan >= least * (1 - 1e-9)


def test_only_what_is_there_can_be_split() -> None:
    schedule = build("1f1b", 2, 2)
    chosen = [schedule.actions[1][1]]
    assert kinds(split_backward(schedule, chosen)) == {Kind.F: 4, Kind.B: 3, Kind.I: 1, Kind.W: 1}
    with pytest.raises(ScheduleError, match="1f1b has no full backward 1F0 to split"):
        split_backward(schedule, [schedule.actions[1][0]])
