"""The simulator gives the known times and peaks of simple schedules; messages share links and ports."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Action, Schedule, StageCosts, build, memory_during, names, replicate, simulate


def equal(stages, forward=1.0, inputs=1.0, weights=1.0, **more):
    return StageCosts([forward] * stages, [inputs] * stages, [weights] * stages, **more)


def test_starts_and_ends_of_unequal_stages():
    timeline = simulate(build("1f1b", 2, 2), StageCosts([1, 2], [1, 2], [1, 2], latency=0.5))
    assert timeline.span(Action.parse("1F0")) == (1.5, 3.5)
    assert timeline.span(Action.parse("1B0")) == (3.5, 7.5)
    assert timeline.span(Action.parse("0B0")) == (8.0, 10.0)
    assert timeline.span(Action.parse("1F1")) == (7.5, 9.5)
    assert timeline.makespan == 16.0


def test_latency_is_read_from_row_to_column():
    costs = equal(2, latency=[[0, 5], [0.25, 0]])
    timeline = simulate(build("1f1b", 2, 1), costs)
    assert timeline.span(Action.parse("1F0")) == (1 + 5, 1 + 5 + 1)
    assert timeline.makespan == 1 + 5 + 3 + 0.25 + 2


def test_contention_lets_a_link_carry_one_message_at_a_time():
    costs = equal(2, 1, 1, 1, message_bytes=[30, 0], bandwidth=10.0)
    gpipe = build("gpipe", 2, 3)
    free, shared = (simulate(gpipe, costs, contention=contention) for contention in (False, True))
    assert [free.span(Action.parse(f"1F{k}"))[0] for k in range(3)] == [4, 5, 6]
    assert [shared.span(Action.parse(f"1F{k}"))[0] for k in range(3)] == [4, 7, 10]


def test_1f1b_keeps_one_micro_batch_more_on_each_earlier_stage():
    for name, micro_batches, expected in (
        ("1f1b", 8, (4, 3, 2, 1)),
        ("1f1b", 2, (2, 2, 2, 1)),
        ("eager-1f1b", 8, (7, 5, 3, 1)),
        ("gpipe", 8, (8, 8, 8, 8)),
        ("sequential", 8, (1, 1, 1, 1)),
    ):
        timeline = simulate(build(name, 4, micro_batches), equal(4, stash_bytes=[1] * 4))
        assert timeline.peak_bytes == expected


@pytest.mark.parametrize("name", names())
def test_the_largest_of_the_moments_is_the_peak_for_any_sizes(name):
    draw = random.Random(name)
    schedule = build(name, 4, 8)
    stash, waiting = ([draw.randint(0, 1000) for _ in range(schedule.stages)] for _ in range(2))
    timeline = simulate(schedule, equal(schedule.stages, stash_bytes=stash, weight_stash_bytes=waiting))
    for device, moments in enumerate(memory_during(timeline)):
        own = list(schedule.stages_of(device))
        held = moments[:, :, 0] @ [stash[stage] for stage in own] + moments[:, :, 2] @ [
            waiting[stage] for stage in own
        ]
        assert held.max() == timeline.peak_bytes[device]


def test_the_input_backward_releases_what_the_weights_do_not_need():
    split = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    held = [
        simulate(split, equal(1, stash_bytes=[10], weight_stash_bytes=[weight])).peak_bytes[0]
        for weight in (1, 4, 10)
    ]
    assert held == [11, 14, 20]


def test_recompute_keeps_only_the_boundary_until_the_backward():
    schedule = Schedule.from_csv("0F0,0F1,0F2,0RECOMPUTE0,0B0,0RECOMPUTE1,0B1,0RECOMPUTE2,0B2\n")
    timeline = simulate(schedule, equal(1, stash_bytes=[10], boundary_bytes=[1]))
    assert timeline.peak_bytes == (12,)
    assert timeline.makespan == 3 * 4


def test_each_micro_batch_takes_its_own_part_of_the_seconds():
    """Of two stages and micro-batches of 1.5 and 0.5 of the mean, on two devices."""
    costs = StageCosts([2, 2], [2, 2], [2, 2], micro_batch_scale=[1.5, 0.5])
    timeline = simulate(build("gpipe", devices=2, micro_batches=2), costs)
    assert timeline.ends[0][:2] == (3, 4)
    assert timeline.ends[1][:2] == (6, 7)


def test_the_sum_of_the_gradients_is_priced_once_all_copies_are_done():
    whole = replicate(build("gpipe", 2, 2), 2)
    # Stage 0 is done last: its sum of 5 seconds ends the step, and that of stage 1 runs beside.
    summed = equal(2, reduce_grad=[5, 7])
    assert simulate(whole, summed).makespan == simulate(build("gpipe", 2, 2), summed).makespan + 5
    slow = StageCosts([1, 1, 3, 3], [1, 1, 3, 3], [0, 0, 0, 0], reduce_grad=[1] * 4)
    timeline = simulate(whole, slow)
    assert timeline.makespan == 3 * 6 + 1
    assert timeline.span(whole.actions[0][-1]) == (18, 19)


TWO_HOSTS = {
    (a, b): [(("out", a // 2), 1.0), (("in", b // 2), 1.0)]
    for a in range(4)
    for b in range(4)
    if a // 2 != b // 2
}


QUICK = {pair: [(name, 3.0) for name, _ in route] for pair, route in TWO_HOSTS.items()}


@pytest.mark.parametrize(
    ("ports", "first", "sent"),
    [
        ({}, 1.0, [(0, 1, 4), (2, 1, 4)]),
        (TWO_HOSTS, 1.0, [(0, 1, 4), (2, 4, 7)]),  # one after the other through one port
        (TWO_HOSTS, 2.0, [(2, 1, 4), (0, 4, 7)]),  # the one that was sent first leaves first
        (QUICK, 1.0, [(0, 1, 4), (2, 2, 5)]),  # a port is busy for the bytes that pass it
        ({(0, 2): [("out", 0.5), ("in", 3.0)]}, 1.0, [(0, 1, 7), (2, 1, 4)]),  # as long as the slowest port
    ],
)
def test_messages_of_two_pairs_share_ports(ports, first, sent):
    """Two copies of a model of two stages: 0 -> 2 and 1 -> 3, one micro-batch each; outputs of 3 bytes."""
    schedule = Schedule.from_csv("0F0\n2F1\n1F0\n3F1\n", replicas=2)
    size: dict[str, Any] = {"bandwidth": 1.0, "message_bytes": [3.0, 0, 3.0, 0], "ports": ports}
    timeline = simulate(schedule, StageCosts([first, 1, 1, 1], [0] * 4, [0] * 4, **size), contention=True)
    assert [(one.source, one.start, one.end) for one in timeline.transfers] == sent
    assert timeline.makespan == 1 + max(end for *_, end in sent)


times = st.lists(st.integers(0, 5), min_size=8, max_size=8)


@given(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]), times, times, times, times)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_a_port_for_each_pair_is_a_link_that_carries_one_message_at_a_time(name, f, i, w, sizes):
    chunks = 2 if name in ("interleaved-1f1b", "zb-v") else 1
    order = build(name, 4, 4, chunks)
    n = order.stages
    link = {"latency": 0.5, "bandwidth": 2.0, "message_bytes": sizes[:n]}
    own = {(a, b): [((a, b), 2.0)] for a in range(4) for b in range(4) if a != b}
    plain = simulate(order, StageCosts(f[:n], i[:n], w[:n], **link), contention=True)
    through = simulate(order, StageCosts(f[:n], i[:n], w[:n], **link, ports=own), contention=True)
    assert through.ends == plain.ends
    assert through.starts == plain.starts
    assert sorted(through.transfers) == sorted(plain.transfers)


@given(st.integers(1, 12), times)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_no_port_carries_two_messages_at_a_time(micro_batches, sizes):
    order = replicate(build("1f1b", 2, micro_batches), 2)
    where = {(0, 1): [("out", 1.0)], (2, 3): [("out", 1.0)], (1, 0): [("in", 1.0)], (3, 2): [("in", 1.0)]}
    costs = StageCosts([1, 2] * 2, [1, 1] * 2, [1] * 4, bandwidth=1.0, message_bytes=sizes[:4], ports=where)
    timeline = simulate(order, costs, contention=True)
    for forward in (True, False):
        busy = sorted((t.start, t.end) for t in timeline.transfers if (t.source < t.target) is forward)
        assert all(before <= start for (_, before), (start, _) in itertools.pairwise(busy))
    assert timeline.makespan >= simulate(order, costs).makespan
