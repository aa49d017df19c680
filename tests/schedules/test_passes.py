"""What passes write, what texts are read as, and where copies between a device and its host stand."""

import random

import pytest

import schedules
from schedules import Action, Kind, Schedule, StageCosts, build, check, replicate, simulate

OVERLAPPED = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
# The table of torch's 1F1B with its compute_comms: weights are gathered first and freed last.
OF_TORCH = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD\n"
)

# A schedule, and its rows.
WRITTEN: dict[str, tuple[Schedule, list[str]]] = {
    "split backwards": (
        schedules.split_backward(build("1f1b", 2, 2)),
        ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"],
    ),
    "fused backwards": (
        schedules.fuse_backward(build("zb-h1", 2, 3)),
        ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
    ),
    "pairs come apart": (schedules.split_overlaps(OVERLAPPED), ["0F0 0F1 0B0 0B1"]),
    "pairs come apart and are split": (schedules.split_backward(OVERLAPPED), ["0F0 0F1 0I0 0W0 0I1 0W1"]),
    "recompute of some stages only": (
        schedules.insert_recompute(build("1f1b", 2, 1), [0]),
        ["0F0 0RECOMPUTE0 0B0", "1F0 1B0"],
    ),
    "gradients are reduced after the last backward of each stage": (
        schedules.insert_reduce_grad(build("zb-v", 1, 1)),
        ["0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD"],
    ),
    "an optimizer step a stage": (
        schedules.insert_optimizer_step(build("1f1b", 2, 1)),
        ["0F0 0B0 0OPT_STEP", "1F0 1B0 1OPT_STEP"],
    ),
    "a copy without micro-batches only reduces": (
        replicate(build("1f1b", 1, 1), 2, 1),
        ["0F0 0B0 0REDUCE_GRAD", "1REDUCE_GRAD"],
    ),
    "micro-batches are dealt out in turn": (
        replicate(build("gpipe", 1, 2), 2, 3),
        ["0F0 0F2 0B0 0B2 0REDUCE_GRAD", "1F1 1B1 1REDUCE_GRAD"],
    ),
    "reductions that are there stay where they are": (
        replicate(schedules.insert_reduce_grad(build("zb-v", 1, 1)), 2),
        [
            "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD",
            "2F1 3F1 3I1 3W1 3REDUCE_GRAD 2I1 2W1 2REDUCE_GRAD",
        ],
    ),
    "stashes are copied beside a whole action, if there is time for it": (
        schedules.insert_offload(build("1f1b", 3, 4)),
        [
            "0F0 0F1 0F2 0OFFLOAD1 0B0 0OFFLOAD2 0RELOAD1 0F3 0RELOAD2 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ],
    ),
    "copies of one stage beside actions of another one, once": (
        schedules.insert_offload(schedules.insert_offload(build("zb-v", 1, 2), [0])),
        ["0F0 1F0 0OFFLOAD0 1I0 1W0 0RELOAD0 0F1 0I0 0OFFLOAD1 0W0 1F1 1I1 0RELOAD1 1W1 0I1 0W1"],
    ),
    "no copies of other stages": (
        schedules.insert_offload(build("gpipe", 1, 4), []),
        ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"],
    ),
    "no copy of a micro-batch that is recomputed": (
        schedules.insert_offload(schedules.insert_recompute(build("gpipe", 1, 4), [0], [0, 1])),
        ["0F0 0F1 0F2 0F3 0OFFLOAD2 0RECOMPUTE0 0OFFLOAD3 0B0 0RECOMPUTE1 0RELOAD2 0B1 0RELOAD3 0B2 0B3"],
    ),
    "empty cells and lines": (Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n\n , \n"), ["0F0 0B0", "1F0 1B0"]),
    "cells of torch for messages and sharded weights": (
        Schedule.from_csv(OF_TORCH),
        ["0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"],
    ),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written(case):
    schedule, expected = WRITTEN[case]
    assert [" ".join(map(str, row)) for row in schedule.actions] == expected


def test_fused_is_what_was_split():
    assert schedules.fuse_backward(schedules.split_backward(build("1f1b", 2, 2))) == build("1f1b", 2, 2)


def test_copies_of_a_model_wait_for_each_other_before_they_reduce():
    reduced = schedules.insert_reduce_grad(build("chimera", 2, 2))
    assert [[str(action) for action in row[-2:]] for row in reduced.actions] == [
        ["0REDUCE_GRAD", "3REDUCE_GRAD"],
        ["2REDUCE_GRAD", "1REDUCE_GRAD"],
    ]
    timeline = simulate(reduced, StageCosts([1, 4], [1, 4], [1, 4], reduce_grad=[2, 3]))
    first, second = (timeline.span(reduced.actions[device][-2])[0] for device in range(2))
    assert first == second


def test_copies_of_copies_are_copies():
    assert replicate(build("1f1b", 2, 4), 1) == build("1f1b", 2, 4)
    assert replicate(replicate(build("gpipe", 2, 2), 2), 2).replicas == 4
    whole = replicate(build("chimera", 2, 2), 2)
    check(whole)
    assert (whole.replicas, whole.device_of) == (4, (0, 1, 1, 0, 2, 3, 3, 2))


def test_an_action_prints_as_it_was_parsed():
    pair = Action.overlap(Action(Kind.F, 0, 1), Action(Kind.B, 3, 2))
    assert Action.parse("(0F1;3B2)OVERLAP_F_B") == pair
    for text in ("0F0", "12I31", "1W3", "0B1", "0REDUCE_GRAD", "2OPT_STEP", "2OPT_STEP5", str(pair)):
        assert str(Action.parse(text)) == text


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


def test_the_text_and_fewer_micro_batches_keep_the_copies_in_place():
    offloaded = schedules.insert_offload(built("1f1b"), [0])
    assert Schedule.from_csv(offloaded.to_csv(), offloaded.name).actions == offloaded.actions
    schedules.check(schedules.without_micro_batches(offloaded, 5))
    schedules.check(schedules.replicate(offloaded, 2))
