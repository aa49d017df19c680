"""What schedules cannot be, and numbers that make none: each is refused by name, with what would do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schedules import (
    Action,
    Schedule,
    ScheduleError,
    StageCosts,
    Timeline,
    bound,
    build,
    check,
    connection_rounds,
    insert_offload,
    insert_optimizer_step,
    insert_recompute,
    message_order,
    replicate,
    search,
    simulate,
)

ONE_F_ONE_B = build("1f1b", 2, 4)
SMALL = build("1f1b", 2, 1)
CROSSED = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
NAN = float("nan")


def costs(stages: int = 2, **more: Any) -> StageCosts:
    return StageCosts([1] * stages, [1] * stages, [1] * stages, **more)


STASH = costs(stash_bytes=[4, 4])
SKIPS = [(0, 1, 1.0), (2, 0, 1.0), (0, 4, 1.0), (0, 2, -1.0)]


def played(schedule: Schedule) -> Timeline:
    return simulate(schedule, costs(schedule.stages))


def cut_short() -> Timeline:
    trace = played(build("1f1b", 2, 3)).to_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["name"] != "1B₂"]
    return Timeline.from_trace(trace)


def edited(**fields: Any) -> Schedule:
    return Schedule.from_json(json.dumps(json.loads(ONE_F_ONE_B.to_json()) | fields))


# Tables of actions, and what is wrong with them.
IMPOSSIBLE = [
    ("0F0\n1F0,1B0\n", "0F0 .* has no full backward: 0B0 or 0I0 and 0W0 are missing"),
    ("0F0,0I0\n1F0,1B0\n", "0F0 .* has no full backward: 0W0 is missing"),
    ("0F0,0B0\n1B0\n", "1F0 is missing, though 0F0 is there"),
    ("0F0,0B0\n1F0,1F0,1B0\n", "1F0 stands twice: at device 1, position 0 and at device 1, position 1"),
    ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "0B0 .* conflicts with 0I0"),
    ("0B0,0F0\n1F0,1B0\n", "0B0 at device 0, position 0 needs 0F0, which comes at device 0, position 1"),
    ("0F0,0W0,0I0\n1F0,1B0\n", "0W0 .* needs 0I0"),
    ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock: .*device 0 at 0B0 for 1B0"),
    ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2\n", "micro-batch 1 has no forward: 0F1 is missing"),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0\n", "0B1 at .* needs 0F1, which comes at"),
    ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n", "must overlap one forward with one backward"),
    ("0F0,0B0,0RECOMPUTE0\n", "0B0 .* needs 0RECOMPUTE0, which comes at"),
    ("0RECOMPUTE0,0F0,0B0\n", "0RECOMPUTE0 .* needs 0F0, which comes at"),
    ("0F0,0REDUCE_GRAD,0B0\n", "0REDUCE_GRAD .* comes before 0B0"),
    ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "1REDUCE_GRAD is missing, though 0REDUCE_GRAD"),
    ("0F0,0B0,0OPT_STEP,0F1,0B1\n", "0OPT_STEP .* comes before 0B1"),
    ("0F0,0B0,0OPT_STEP,0REDUCE_GRAD\n", "0OPT_STEP .* comes before 0REDUCE_GRAD"),
    ("0F0,0B0,0OPT_STEP\n1F0,1B0\n", "1OPT_STEP is missing"),
    ("0F0,0RELOAD0,0B0\n", "0RELOAD0 at device 0, position 1 needs 0OFFLOAD0, which is missing"),
    ("0F0,0OFFLOAD0,0B0\n", "0OFFLOAD0 at .* needs 0RELOAD0, which is missing"),
    ("0F0,0OFFLOAD0,0RECOMPUTE0,0RELOAD0,0B0\n", "conflicts with 0RECOMPUTE0"),
    ("0OFFLOAD0,0F0,0RELOAD0,0B0\n", "0OFFLOAD0 at .* needs 0F0, which comes at"),
]
NO_ACTIONS = [
    *("2F0garbage", " 2F0", "2F0 ", "2F", "F0", "2X0", "02F0", "2F00", "-1F0", "", "2f0", "٣F0"),
    *("0REDUCE_GRAD3", "(0F1)OVERLAP_F_B", "(0F1;3B2)OVERLAP_F_B0", "(0F1;3B2;1F1)OVERLAP_F_B"),
]

# What is said, and what it is said of.
REFUSED: list[tuple[str, Callable[[], object]]] = [
    # schedules by name
    (r"no schedule is called '1flb'; did you mean '1f1b'\? there are .*zb-v", lambda: build("1flb", 4, 8)),
    ("1f1b has no option 'waves'", lambda: build("1f1b", 4, 8, waves=2)),
    ("gpipe needs chunks=1, got chunks=2", lambda: build("gpipe", 4, 8, chunks=2)),
    ("even number of devices, got 3; 2 or 4 would do", lambda: build("chimera", 3, 6)),
    ("10 is no multiple of that; 8 or 12 is", lambda: build("pipedream-2bw", 4, 10)),
    ("got accumulate=3 for 4 devices", lambda: build("pipedream-2bw", 4, 9, accumulate=3)),
    ("got 3; 2 or 4 would do", lambda: build("hanayo", 4, 8, chunks=3)),
    ("got chunks=0", lambda: build("interleaved-1f1b", 4, 8, chunks=0)),
    ("zb-v needs chunks=2, got chunks=3", lambda: build("zb-v", 4, 8, chunks=3)),
    ("'search' is made from costs", lambda: build("search", 3, 6)),
    ("chunks=3 on 2 devices needs .* 6 stages", lambda: build("search", 2, 2, chunks=3, costs=costs(4))),
    ("search has no option 'waves'; it has costs, effort", lambda: build("search", 2, 2, costs=costs(), waves=2)),
    # a search
    ("device 1 has room for 3 bytes of stash, one micro-batch needs 4", lambda: search(STASH, 2, 4, memory=[4, 3])),
    ("2 stages do not divide evenly over 3 devices", lambda: search(STASH, 3, 4)),
    ("memory has 1 numbers for 2 devices", lambda: bound(STASH, 2, 4, memory=[4])),
    ("memory of device 1 is nan", lambda: search(STASH, 2, 4, memory=[4, NAN])),
    ("memory of device 1 is -1.0", lambda: search(STASH, 2, 4, memory=[4, -1.0])),
    ("one of makespan, zero-bubble, got 'speed'", lambda: search(STASH, 2, 4, objective="speed")),
    ("one of makespan, zero-bubble, got 'speed'", lambda: bound(STASH, 2, 4, objective="speed")),
    # placements, numbers and memory
    (
        "1F0 stands at device 0, position 0, but stage 1 is on device 1",
        lambda: check(replace(ONE_F_ONE_B, actions=ONE_F_ONE_B.actions[::-1])),
    ),
    ("no micro-batch 3 among 3", lambda: check(replace(ONE_F_ONE_B, micro_batches=3))),
    ("1F0 repeats 0F0 in another copy", lambda: check(Schedule.from_csv("0F0,0B0\n1F0,1B0\n", replicas=2))),
    ("memory= cannot be checked without costs=", lambda: check(ONE_F_ONE_B, memory=[1, 1])),
    ("memory has 1 numbers for 2 devices", lambda: check(ONE_F_ONE_B, STASH, memory=[1])),
    (
        "0F1 on device 0 raises its stash to 8 bytes, it has room for 7",
        lambda: check(ONE_F_ONE_B, STASH, memory=[7, 4]),
    ),
    # actions
    *[(says, lambda table=table: check(Schedule.from_csv(table))) for table, says in IMPOSSIBLE],
    # texts
    *[("no action|no micro-batch|reduced once", lambda text=text: Action.parse(text)) for text in NO_ACTIONS],
    ("0B0 stands on device 1, but stage 0 is on device 0", lambda: Schedule.from_csv("0F0\n0B0\n")),
    ("device 1: '1F0x' is no action", lambda: Schedule.from_csv("0F0,0B0\n1F0x,1B0\n")),
    ("micro_batches", lambda: edited(micro_batches=2.5)),
    ("device_of.1", lambda: edited(device_of=[0, True])),
    ("surprise", lambda: edited(surprise=1)),
    ("not a schedule as", lambda: Schedule.from_json("{")),
    ("lacks 1 of its 12 actions", cut_short),
    # costs
    ("costs are for 3 stages, 1f1b has 2", lambda: simulate(ONE_F_ONE_B, costs(3))),
    ("backward_input has 1 numbers for 2 stages", lambda: StageCosts([1, 1], [1], [1, 1])),
    ("latency is -1.0; seconds are finite and not negative", lambda: costs(latency=-1.0)),
    ("latency is nan", lambda: costs(latency=NAN)),
    ("latency is inf", lambda: costs(latency=float("inf"))),
    ("latency from device 0 to device 1 is -1", lambda: costs(latency=[[0, -1], [0, 0]])),
    ("a number or a square matrix; row 0 has 2 of 1", lambda: costs(latency=[[0, 1]])),
    ("bandwidth is 0.0; bytes per second are more than 0", lambda: costs(bandwidth=0.0)),
    ("bandwidth from device 1 to device 0 is nan", lambda: costs(bandwidth=[[0, 5], [NAN, 0]])),
    ("stash_bytes of stage 0 is nan", lambda: costs(stash_bytes=[NAN, 1])),
    ("micro_batch_scale of micro-batch 1 is -1", lambda: costs(micro_batch_scale=[1, -1])),
    (
        "micro_batch_scale has 2 numbers for 4 micro-batches",
        lambda: simulate(ONE_F_ONE_B, costs(micro_batch_scale=[1, 1])),
    ),
    ("port 'out' from device 0 to device 1 carries 0", lambda: costs(ports={(0, 1): [("out", 0.0)]})),
    *[("goes past a stage", lambda skip=skip: costs(4, skips=[skip])) for skip in SKIPS],
    (
        "device 1 sends to device 0, and the costs have no link",
        lambda: simulate(ONE_F_ONE_B, costs(latency={(0, 1): 1.0})),
    ),
    (
        "deadlock: device 0 at 0B0 for 1B0; device 1 at 1F1 for 0F1: each waits for the next",
        lambda: simulate(CROSSED, costs()),
    ),
    # passes
    ("at least 1, got replicas=0", lambda: replicate(ONE_F_ONE_B, 0)),
    ("at least 1, got replicas=True", lambda: replicate(ONE_F_ONE_B, True)),
    ("2 replicas of 1f1b with 4 micro-batches run 1 to 8, got", lambda: replicate(ONE_F_ONE_B, 2, 9)),
    ("got micro_batches=0", lambda: replicate(ONE_F_ONE_B, 2, 0)),
    ("pipedream is asynchronous", lambda: replicate(build("pipedream", 2, 2), 2)),
    ("pipedream is asynchronous", lambda: insert_optimizer_step(build("pipedream", 2, 2))),
    ("1f1b has no stage 5 to recompute among 2", lambda: insert_recompute(ONE_F_ONE_B, [5])),
    ("1f1b has no stage 9 to offload among 2", lambda: insert_offload(ONE_F_ONE_B, [9])),
    ("edge (1, 1) leads from a rank to itself", lambda: connection_rounds([(1, 1)])),
    ("messages ['a'] of a step are received and were never sent", lambda: message_order({0: [(False, "a")]})),
    # timelines and pictures
    ("starts are given for", lambda: Timeline(SMALL, [[0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])),
    (
        "1B0 ends at 0.5, before it starts at 1.0",
        lambda: Timeline(SMALL, [[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.5]]),
    ),
    ("no action 5F0", lambda: played(SMALL).span(Action.parse("5F0"))),
    ("width=20", lambda: played(SMALL).svg(width=20)),
    ("1 labels for 2 devices", lambda: played(SMALL).svg(labels=["one"])),
    ("labels='ab'", lambda: played(SMALL).svg(labels="ab")),
    ("20,000 actions, and gpipe has 257 and ", lambda: played(build("gpipe", 257, 1)).svg()),
    ("256 devices and 20,000 actions, and gpipe has 8 and ", lambda: played(build("gpipe", 8, 1_300)).svg()),
]  # fmt: skip


@pytest.mark.parametrize(("says", "act"), REFUSED, ids=[says[:40] for says, _ in REFUSED])
def test_what_cannot_be_is_refused_by_name(says: str, act: Callable[[], object]):
    with pytest.raises((ScheduleError, ValueError, TypeError, RuntimeError)) as caught:
        act()
    assert says in str(caught.value) or re.search(says, str(caught.value))
