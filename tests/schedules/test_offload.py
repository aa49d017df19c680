"""Offload: position, duration and saved memory of the copies between a device and its host."""

import random

import pytest

import schedules
from schedules import Action, Kind, Schedule, ScheduleError, StageCosts

NAMES = ("1f1b", "zb-v", "dualpipe-v", "chimera")
_NEEDED = {Kind.OFFLOAD: Kind.F, Kind.B: Kind.RELOAD, Kind.I: Kind.RELOAD}


def built(name: str, devices: int = 4, micro_batches: int = 8) -> Schedule:
    return schedules.build(name, devices=devices, micro_batches=micro_batches)


def costs_of(schedule: Schedule, copy: float = 0.0) -> StageCosts:
    draw = random.Random(schedule.name)
    count = schedule.model_stages
    forward, inputs, weights = ([draw.uniform(1, 2) for _ in range(count)] for _ in range(3))
    return StageCosts(
        forward,
        inputs,
        weights,
        stash_bytes=[10.0] * count,
        boundary_bytes=[1.0] * count,
        host_copy=[copy] * count,
    )


def played_on_one_device(schedule: Schedule, costs: StageCosts) -> float:
    """The end of a schedule of one device, action after action; its copies follow one another."""
    seconds = {Kind.F: costs.forward[0], Kind.B: costs.backward[0]}
    now = copied = 0.0
    there: dict[Action, float] = {}
    for action in schedule.actions[0]:
        if (needed := _NEEDED.get(action.kind)) is not None:
            now = max(now, there.get(action._replace(kind=needed), 0.0))
        now += seconds.get(action.kind, costs.offload[0])
        if action.kind in (Kind.F, Kind.RELOAD) and _is_copied(schedule, action):
            copied = max(copied, now) + costs.host_copy[0]
            there[action] = copied
    return now


def _is_copied(schedule: Schedule, action: Action) -> bool:
    return action._replace(kind=Kind.OFFLOAD) in schedule.actions[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_copy_runs_beside_a_whole_action_of_its_device(name: str):
    offloaded = schedules.insert_offload(built(name))
    schedules.check(offloaded)
    found = 0
    for row in offloaded.actions:
        busy = [one for one in row if one.kind not in (Kind.OFFLOAD, Kind.RELOAD)]
        before = {
            copy: busy.index(next(one for one in row[at:] if one in busy))
            for at, copy in enumerate(row)
            if copy not in busy
        }
        for copy, place in before.items():
            kinds = (Kind.F,) if copy.kind is Kind.OFFLOAD else (Kind.B, Kind.I)
            own = next(i for i, one in enumerate(busy) if one.kind in kinds and one[1:3] == copy[1:3])
            assert place - own == (2 if copy.kind is Kind.OFFLOAD else -1)
            found += 1
    assert found


@pytest.mark.parametrize("name", NAMES)
def test_copies_that_keep_up_take_no_time_and_free_memory(name: str):
    bare = schedules.split_overlaps(built(name, micro_batches=16))
    costs = costs_of(bare)
    kept = schedules.simulate(bare, costs)
    offloaded = schedules.simulate(schedules.insert_offload(bare), costs)
    assert offloaded.makespan == pytest.approx(kept.makespan)
    assert all(new <= old for new, old in zip(offloaded.peak_bytes, kept.peak_bytes, strict=True))
    assert sum(offloaded.peak_bytes) < sum(kept.peak_bytes)


def test_three_stashes_at_most_are_on_a_device_however_many_micro_batches_there_are():
    for count in (6, 12, 40):
        offloaded = schedules.insert_offload(built("gpipe", 2, count))
        costs = StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[100, 100], boundary_bytes=[1, 1])
        assert schedules.simulate(offloaded, costs).peak_bytes[0] == 300 + count - 3


@pytest.mark.parametrize("copy", [0.0, 0.5, 1.3, 2.0, 7.0])
@pytest.mark.parametrize("blocked", [0.0, 0.25])
def test_copies_of_a_device_follow_one_another(copy: float, blocked: float):
    offloaded = schedules.insert_offload(schedules.build("gpipe", devices=1, micro_batches=9))
    costs = StageCosts([1.0], [0.7], [1.1], host_copy=[copy], offload=[blocked])
    timeline = schedules.simulate(offloaded, costs)
    assert timeline.makespan == pytest.approx(played_on_one_device(offloaded, costs))
    assert timeline.idle[0].transfer == pytest.approx(timeline.idle[0].total)
    assert [one.micro_batch for one in timeline.transfers if one.kind is Kind.RELOAD] == list(
        range(9 if copy else 0)
    )
    assert schedules.Timeline.from_trace(timeline.to_trace()) == timeline


def test_a_micro_batch_that_is_recomputed_or_used_at_once_is_not_copied():
    assert schedules.insert_offload(built("1f1b"), [3]) == built("1f1b")
    recomputed = schedules.insert_recompute(built("gpipe"), [1], [0, 1])
    copied = {
        action.micro_batch
        for action in schedules.insert_offload(recomputed, [1]).actions[1]
        if action.kind is Kind.RELOAD
    }
    assert copied == {2, 3, 4, 5, 6, 7}


def test_the_text_and_fewer_micro_batches_keep_the_copies_in_place():
    offloaded = schedules.insert_offload(built("1f1b"), [0])
    assert Schedule.from_csv(offloaded.to_csv(), offloaded.name).actions == offloaded.actions
    schedules.check(schedules.without_micro_batches(offloaded, 5))
    schedules.check(schedules.replicate(offloaded, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0OFFLOAD0,", "", "0RELOAD0 at device 0, position .* needs 0OFFLOAD0, which is missing"),
        ("0RELOAD0,", "", "0OFFLOAD0 at .* needs 0RELOAD0, which is missing"),
        ("0RELOAD0,", "0RECOMPUTE0,0RELOAD0,", "conflicts with 0RECOMPUTE0"),
        ("0F0,0F1,0OFFLOAD0", "0OFFLOAD0,0F0,0F1", "0OFFLOAD0 at .* needs 0F0, which comes at"),
    ],
)
def test_copies_out_of_place_are_refused(old: str, new: str, message: str):
    text = schedules.insert_offload(built("gpipe", 1, 5)).to_csv()
    assert old in text
    with pytest.raises(ScheduleError, match=message):
        schedules.check(Schedule.from_csv(text.replace(old, new)))
