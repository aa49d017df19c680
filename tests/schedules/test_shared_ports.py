"""Ports that devices share: their messages follow each other, each direction apart."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import Schedule, StageCosts, build, simulate
from schedules.core.action import Action

TWO_HOSTS = {
    (a, b): [(("out", a // 2), 1.0), (("in", b // 2), 1.0)]
    for a in range(4)
    for b in range(4)
    if a // 2 != b // 2
}


def two_pairs(ports, sizes=(3.0, 3.0), forward=(1.0, 1.0)) -> schedules.Timeline:
    """Two copies of a model of two stages: 0 -> 2 and 1 -> 3, one micro-batch each; outputs of 3 bytes."""
    actions = [["0F0"], ["2F1"], ["1F0"], ["3F1"]]
    rows = tuple(tuple(Action.parse(text) for text in row) for row in actions)
    schedule = Schedule("two pairs", rows, (0, 2, 1, 3), 2, replicas=2)
    costs = StageCosts(
        [forward[0], 1, forward[1], 1],
        [0] * 4,
        [0] * 4,
        bandwidth=1.0,
        message_bytes=[sizes[0], 0, sizes[1], 0],
        ports=ports,
    )
    return simulate(schedule, costs, contention=True)


def test_two_messages_through_one_port_take_twice_as_long():
    assert two_pairs({}).makespan == 1 + 3 + 1
    assert two_pairs(TWO_HOSTS).makespan == 1 + 3 + 3 + 1


def test_the_message_that_was_sent_first_leaves_first():
    late = two_pairs(TWO_HOSTS, forward=(2.0, 1.0))
    assert [(t.source, t.start, t.end) for t in late.transfers] == [(2, 1, 4), (0, 4, 7)]


def test_a_port_is_busy_for_the_bytes_that_pass_it():
    quick = {pair: [(name, 3.0) for name, _ in route] for pair, route in TWO_HOSTS.items()}
    assert [(t.start, t.end) for t in two_pairs(quick).transfers] == [(1, 4), (2, 5)]


def test_a_message_takes_as_long_as_its_slowest_port():
    slow = {(0, 2): [("out", 0.5), ("in", 3.0)]}
    assert sorted((t.start, t.end) for t in two_pairs(slow).transfers) == [(1, 4), (1, 7)]


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
    order = schedules.replicate(build("1f1b", 2, micro_batches), 2)
    where = {(0, 1): [("out", 1.0)], (2, 3): [("out", 1.0)], (1, 0): [("in", 1.0)], (3, 2): [("in", 1.0)]}
    costs = StageCosts([1, 2] * 2, [1, 1] * 2, [1] * 4, bandwidth=1.0, message_bytes=sizes[:4], ports=where)
    timeline = simulate(order, costs, contention=True)
    for forward in (True, False):
        busy = sorted((t.start, t.end) for t in timeline.transfers if (t.source < t.target) is forward)
        assert all(before <= start for (_, before), (start, _) in itertools.pairwise(busy))
    assert timeline.makespan >= simulate(order, costs).makespan
