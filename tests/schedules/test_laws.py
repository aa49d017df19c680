"""Laws of every schedule there is: it is legal, stays so under each pass, and survives every written form."""

from __future__ import annotations

import json
from itertools import product

import pytest

import schedules
from schedules import (
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    Timeline,
    build,
    check,
    names,
    replicate,
    simulate,
)
from tests.support.trace_format import check_trace_format

PASSES = [
    *(schedules.split_overlaps, schedules.split_backward, schedules.fuse_backward),
    *(schedules.insert_recompute, schedules.insert_reduce_grad),
]
CHUNKED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "hanayo")
SYNCHRONOUS = [name for name in names() if not name.startswith("pipedream")]


def uneven(schedule: Schedule, **more) -> StageCosts:
    """Costs that differ from stage to stage."""
    stages = schedule.model_stages
    return StageCosts(
        [1 + 0.1 * stage for stage in range(stages)], [1.3] * stages, [0.7] * stages,
        stash_bytes=[1.0 + stage for stage in range(stages)], **{"latency": 0.25, **more},
    )  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_it_is_legal_for_small_numbers_or_its_error_names_them(name):
    chunks_of = {"hanayo": (2, 4)}.get(name, (1, 3)) if name in CHUNKED else (None,)
    for p, m, chunks in product((1, 2, 3, 5), (1, 2, 4, 7, 8), chunks_of):
        try:
            schedule = build(name, p, m, chunks=chunks)
        except ScheduleError as error:
            assert str(p) in str(error) or str(m) in str(error)  # noqa: PT017
            assert name in ("chimera", "pipedream-2bw")
            continue
        check(schedule)
    for devices, micro_batches in ((0, 4), (4, 0)):
        with pytest.raises(ScheduleError, match=f"got {devices} and {micro_batches}"):
            build(name, devices, micro_batches)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("apply", PASSES)
def test_every_pass_keeps_it_legal_and_is_idempotent(name, apply):
    for p, m in ((2, 4), (4, 8)):
        once = apply(build(name, p, m))
        check(once)
        assert apply(once) == once


@pytest.mark.parametrize("name", names())
def test_all_passes_together_can_be_played(name):
    bare = schedules.split_overlaps(build(name, 4, 8))
    whole = schedules.insert_reduce_grad(schedules.insert_recompute(bare))
    whole = whole if whole.versions else schedules.insert_optimizer_step(whole)
    check(whole)
    reduced = uneven(whole, reduce_grad=[0.5] * whole.model_stages)
    assert simulate(whole, reduced).makespan > simulate(bare, reduced).makespan


@pytest.mark.parametrize("name", names())
def test_it_reads_back_from_json_and_csv(name):
    schedule = build(name, 4, 8)
    assert Schedule.from_json(schedule.to_json()) == schedule
    read = Schedule.from_csv(schedule.to_csv(), replicas=schedule.replicas)
    kept = ("actions", "device_of", "micro_batches")
    assert [getattr(read, field) for field in kept] == [getattr(schedule, field) for field in kept]


@pytest.mark.parametrize("name", names())
def test_transfers_lead_from_maker_to_taker_and_its_trace_keeps_the_format_and_reads_back(name):
    schedule = build(name, 4, 8)
    costs = uneven(schedule, latency=0.003)
    timeline = simulate(schedule, costs)
    trace = json.loads(json.dumps(timeline.to_trace(costs=costs)))
    counts = check_trace_format(trace)
    assert counts["X"] == sum(map(len, timeline.schedule.actions))
    assert counts["b"] == len(timeline.transfers) == counts["s"]
    assert Timeline.from_trace(trace) == timeline
    spans = {
        (action.kind is Kind.F, action.stage, action.micro_batch): (start, end)
        for row in timeline.rows
        for action, start, end in row
        if action.kind in (Kind.F, Kind.B, Kind.I)
    }
    for kind, source, target, micro_batch, start, end, _ in timeline.transfers:
        assert spans[kind is Kind.F, source, micro_batch][1] == start
        assert spans[kind is Kind.F, target, micro_batch][0] >= end
    follows = [(stage, schedule.next_stage(stage)) for stage in range(schedule.stages)]
    homes = [
        (schedule.device_of[one], schedule.device_of[other]) for one, other in follows if other is not None
    ]
    crossed = sum(one != other for one, other in homes)
    assert len(timeline.transfers) == 2 * 8 // schedule.replicas * crossed


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_copies_of_it_are_legal_and_take_as_long_and_hold_as_much_as_one(name):
    one = build(name, 2, 4)
    for copies, micro_batches in ((2, None), (2, 7), (3, 4), (3, 1)):
        whole = replicate(one, copies, micro_batches)
        check(whole)
        assert whole.micro_batches == (micro_batches or 4 * copies)
        assert (whole.replicas, whole.devices) == (copies * one.replicas, copies * 2)
    alone, together = (
        simulate(each, uneven(one)) for each in (schedules.insert_reduce_grad(one), replicate(one, 3))
    )
    assert together.makespan == alone.makespan
    assert together.peak_bytes == 3 * alone.peak_bytes
