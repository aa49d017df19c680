"""Counts the stashes, waiting messages and running actions of each device during each action of a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ..analysis.timeline import Timeline
from ..core.action import Kind
from ..core.dependencies import CODE, Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.stash import count_changes

# The columns of a table of moments.
STASH, INPUT_ONLY, DEFERRED, INPUTS, GRADIENTS, RUNS_F, RUNS_B, RUNS_I, RUNS_W, RUNS_FIRST_B, OF_WEIGHTS = (
    range(11)
)
COLUMNS = 11

_RUNS = {Kind.F: RUNS_F, Kind.RECOMPUTE: RUNS_F, Kind.B: RUNS_B, Kind.I: RUNS_I, Kind.W: RUNS_W}


def memory_during(timeline: Timeline) -> Iterator[np.ndarray]:
    """Yield, per device, the tensors that its stages hold during each of its actions, as counts.

    ::

        stage 0   F0 ───▶ F1 ───▶ F2 ─┐
                   sent            sent, waits ......
        stage 1           F0 ───────▶ B0 ───────▶ F1

    During an action, a device has what the actions before it keep, what the action itself adds, and messages for later
    actions. A message is in the memory of its receiver from the time that it is sent. A forward holds most at its end,
    and a backward in its first half, so messages count that are sent before then. A forward that will be repeated has
    the full stash while it runs.

    The weights of a stage have gradients from an earlier step. Only stages of further replicas, and all of an
    asynchronous schedule, have none before their first backward, and none between an OPT_STEP and the next backward.

    Yields:
        One array per device, of shape (actions, stages of the device, 11); a device without actions has one row of
        zeros. The numbers count:

        - micro-batches with their full stash, with their input alone, and with what W needs,
        - inputs that wait, and gradients of outputs that wait,
        - 1 for the stage that runs F (or RECOMPUTE), B, I, W, or a B that makes the gradients of the weights,
        - -1 for a stage whose weights have no gradients when the action begins.
    """
    schedule = timeline.schedule
    graph = dependencies(schedule)
    adds, releases = count_changes(graph)
    starts, ends = (np.array([at for row in rows for at in row]) for rows in (timeline.starts, timeline.ends))
    peaks = np.where(graph.is_kind(Kind.F, Kind.RECOMPUTE), ends, (starts + ends) / 2)
    messages = _messages(schedule, graph)
    for device, (first, last) in enumerate(pairwise(graph.offsets)):
        stages = schedule.stages_of(device)
        table = np.zeros((last - first, len(stages), COLUMNS), dtype=np.int64)
        if first == last:
            yield np.zeros((1, len(stages), COLUMNS), dtype=np.int64)
            continue
        rows, column = np.arange(last - first), np.searchsorted(stages, graph.stage[first:last])
        kept = np.zeros((last - first, len(stages), 3), dtype=np.int64)
        kept[rows, column] = adds[first:last]
        kept[1:][rows[:-1], column[:-1]] += releases[first : last - 1]
        table[:, :, :3] = np.cumsum(kept, axis=0)
        for kind, runs in _RUNS.items():
            of_kind = np.flatnonzero(graph.code[first:last] == CODE[kind])
            table[of_kind, column[of_kind], runs] = 1
        table[:, :, INPUTS : GRADIENTS + 1] = _waiting(schedule, graph, device, messages[device], ends, peaks)
        missing = _without_gradients(schedule, graph, device, first, last)
        table[:, :, OF_WEIGHTS] = -missing
        table[:, :, RUNS_FIRST_B] = table[:, :, RUNS_B] * missing
        table[:, :, RUNS_B] -= table[:, :, RUNS_FIRST_B]
        yield table


def _without_gradients(
    schedule: Schedule, graph: Dependencies, device: int, first: int, last: int
) -> np.ndarray:
    """Return 1 for each stage whose weights have no gradients when an action begins: [actions, stages]."""
    stages = schedule.stages_of(device)
    missing = np.zeros((last - first, len(stages)), dtype=np.int64)
    for column, stage in enumerate(stages):
        if not schedule.versions and stage < schedule.model_stages:
            continue
        here, code = graph.stage[first:last] == stage, graph.code[first:last]
        makes = here & np.isin(code, [CODE[Kind.B], CODE[Kind.I], CODE[Kind.W]])
        clears = here & (code == CODE[Kind.OPT_STEP])
        count = np.cumsum(makes)
        cleared = np.maximum.accumulate(np.where(clears, count, 0))
        missing[:, column] = count - makes == np.r_[0, cleared[:-1]]
    return missing


def _messages(schedule: Schedule, graph: Dependencies) -> list[np.ndarray]:
    """Return, per device, the dependencies that are messages to it. Between stages of one device nothing is copied."""
    device_of = np.asarray(schedule.device_of)
    arrives = device_of[graph.source_stage] != device_of[graph.target_stage]
    arrives &= ~graph.is_kind(Kind.REDUCE_GRAD)[graph.target]
    edges = np.flatnonzero(arrives)
    edges = edges[np.argsort(graph.target[edges], kind="stable")]
    return np.split(edges, np.searchsorted(graph.target[edges], graph.offsets[1:-1]))


def _waiting(
    schedule: Schedule,
    graph: Dependencies,
    device: int,
    messages: np.ndarray,
    ends: np.ndarray,
    peaks: np.ndarray,
) -> np.ndarray:
    """Return the messages that wait for each stage during each action of a device: [actions, stages, 2]."""
    stages = schedule.stages_of(device)
    begin, end = graph.offsets[device], graph.offsets[device + 1]
    source, target, stage = graph.source[messages], graph.target[messages], graph.target_stage[messages]
    # From the first action whose peak is after the sending to the one before the action that uses the message.
    used = target - begin
    since = np.minimum(np.searchsorted(peaks[begin:end], ends[source]), used)
    place = np.searchsorted(stages, stage), (graph.source_stage[messages] > stage).astype(np.int64)
    changes = np.zeros((end - begin + 1, len(stages), 2), dtype=np.int64)
    np.add.at(changes, (since, *place), 1)
    np.add.at(changes, (used, *place), -1)
    return np.cumsum(changes[:-1], axis=0)
