"""Simulates one step of many cuts of a chain at once, under one schedule."""

from __future__ import annotations

import numpy as np

import schedules
from schedules import Kind
from schedules.core.dependencies import CODE, Dependencies, dependencies

from ...cluster import Cluster
from ..costs.cut_costs import Borders, CutCosts
from ..costs.stage_memory import RECOMPUTES, Floats, Ints

_NUMBERS = 4_000_000  # that are held at a time: ends of actions, for as many cuts as that allows

_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE)

# A cut with its order of the devices, as columns: seconds [kinds * stages + 1, cuts], and delays [borders + 1, cuts].
Columns = tuple[Floats, Floats]


class Levels:
    """The actions of a schedule in levels: an action waits for actions of earlier levels only.

    If messages take time on their link, each is one more action, on a row for that direction of the link, as it carries
    one message at a time.

    Args:
        schedule: of one replica, without recomputes.
        may_recompute: insert a recompute before each backward. One that a stage does not need takes no time.
        on_links: messages take time on their link.
    """

    def __init__(self, schedule: schedules.Schedule, may_recompute: bool, on_links: bool) -> None:
        bare = schedules.split_overlaps(schedule)
        if may_recompute:
            bare = schedules.insert_recompute(bare, range(bare.stages), range(bare.micro_batches))
        found, stages = dependencies(bare), bare.stages
        self._before = np.arange(-1, found.actions - 1)
        self._before[np.array(found.offsets[:-1])] = -1  # row -1 of the ends is zero: the start of the step
        self._source = np.full(found.actions, -1)
        self._source[found.target] = found.source
        self._border = np.full(found.actions, stages - 1)  # the last row of delays is zero
        self._border[found.target] = np.minimum(found.source_stage, found.target_stage)
        row = np.full(len(CODE), -1)
        row[[CODE[kind] for kind in _KINDS]] = np.arange(len(_KINDS))
        kind = row[found.code]
        last = (found.code == CODE[Kind.RECOMPUTE]) & (found.micro_batch == bare.micro_batches - 1)
        nothing = (len(_KINDS) + 1) * stages
        self._seconds = np.where(kind < 0, nothing, (kind + last) * stages + found.stage)
        if on_links:
            self._add_messages(found, np.array(bare.device_of), nothing + 1)
        self.actions = self._source.size
        level_of = _levels(self._before.tolist(), self._source.tolist())
        self.rows = [
            (level, self._before[level], self._source[level], self._border[level], self._seconds[level])
            for level in np.split(np.argsort(level_of, kind="stable"), np.cumsum(np.bincount(level_of))[:-1])
        ]

    def _add_messages(self, found: Dependencies, row_of: Ints, first_row: int) -> None:
        """Add an action for each message between devices; ``first_row`` is that of the first border's seconds."""
        rows = row_of[found.source_stage], row_of[found.target_stage]
        edges = np.flatnonzero(rows[0] != rows[1])
        link = (rows[0] * (row_of.max() + 1) + rows[1])[edges]
        order = np.lexsort((found.source[edges], link))
        edges, link = edges[order], link[order]
        target, numbers = found.target[edges], found.actions + np.arange(edges.size)
        border = self._border[target]
        follows = np.r_[False, link[1:] == link[:-1]]
        self._before = np.r_[self._before, np.where(follows, numbers - 1, -1)]
        self._source = np.r_[self._source, found.source[edges]]
        self._source[target] = numbers
        self._border = np.r_[self._border, np.full(edges.size, row_of.size - 1)]
        self._seconds = np.r_[self._seconds, first_row + border]


class StepTimes:
    """Seconds of one step as :func:`schedules.simulate` has them, for many cuts and orders of the devices at once.

    A level of actions is played with a few operations on arrays::

        end[action] = max(end[action before it on its device], end[its source] + delay) + seconds

    Ports of hosts are taken to be free. Values that skip stages are taken to arrive in time: they leave before the
    output of the previous stage.

    Args:
        cuts: has the layers, the devices, the schedule rows and the recompute modes.
        levels: of the schedule; with recomputes and messages if the cuts may have some.
    """

    def __init__(self, cuts: CutCosts, levels: Levels) -> None:
        self._cuts, self._levels = cuts, levels
        devices = cuts.cluster.devices
        self._speed = np.array([device.speed for device in devices])
        self._action = np.array([device.action_seconds for device in devices])

    @property
    def actions(self) -> int:
        """How many actions, and messages that take time, a step has."""
        return self._levels.actions

    def of(self, borders: Borders, modes: Ints, orders: Ints, *, splits: bool = False) -> Floats:
        """Return the seconds of a step of each cut.

        Args:
            borders: [cuts, borders].
            modes: of the device of each schedule row, by index: [cuts, rows].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].
            splits: return what no choice of backwards to run as I and then W can beat: each gradient leaves after I,
                and a backward takes what is less, the whole or its parts.
        """
        width = max(1, _NUMBERS // (self._levels.actions + 1))
        parts = [slice(first, first + width) for first in range(0, len(borders), width)]
        tables = (self._columns(borders[part], modes[part], orders[part]) for part in parts)
        return np.concatenate([self._step(*table, splits) for table in tables] or [np.zeros(0)])

    def _columns(self, borders: Borders, choices: Ints, orders: Ints) -> Columns:
        """Return the seconds and delays of cuts. Those of messages on links are seconds."""
        cuts, costs = self._cuts, self._cuts.costs
        copies, stages = cuts.copies, cuts.stages
        edges = costs.edges(borders)
        homes = orders[:, cuts.rows]
        of_copies = np.tile(np.diff(costs.sums[:, edges], axis=2), copies)
        forward, inputs, weights, split = of_copies / self._speed[homes]
        backward = inputs + weights
        share = np.maximum(0.0, 1 + np.divide(split, backward, np.zeros_like(split), where=backward > 0))
        modes = np.array(cuts.modes)[choices][:, cuts.rows]
        repeated = np.where(np.tile(costs.has_backward[edges[:, 1:] - 1], copies), forward, 0.0)
        action = self._action[homes]
        latency, per_byte = cuts.crossings.links(homes[:, :-1], homes[:, 1:])
        sizes = np.zeros(latency.shape)
        for first in range(0, copies * stages, stages):
            # There is no border between the copies of the model.
            latency[:, first + stages - 1 : first + stages] = 0.0
            sizes[:, first : first + stages - 1] = cuts.crossings.message_bytes(
                borders, homes[:, first : first + stages]
            )
        nothing = np.zeros((len(borders), 1))
        tables = (
            forward + action,
            inputs * share + action,
            weights * share + action,
            backward + action,
            np.where(np.isin(modes, list(RECOMPUTES)), repeated + action, 0.0),
            np.where(modes == "always", repeated + action, 0.0),  # of the last micro-batch
            nothing,
            sizes * per_byte,
        )
        return np.hstack(tables).T, np.hstack((latency, nothing)).T

    def _step(self, seconds: Floats, delays: Floats, splits: bool) -> Floats:
        sooner = np.zeros_like(seconds)  # the output of an action is there before its end
        if splits:
            stages = len(self._cuts.rows)
            _, inputs, weights, whole = seconds[: 4 * stages].reshape(4, stages, -1)
            whole = np.minimum(whole, inputs + weights)
            seconds = seconds.copy()
            seconds[3 * stages : 4 * stages] = whole
            sooner[3 * stages : 4 * stages] = np.maximum(whole - inputs, 0.0)
        return self._played(seconds, delays, sooner)

    def _played(self, seconds: Floats, delays: Floats, sooner: Floats) -> Floats:
        ends = np.zeros((self._levels.actions + 1, seconds.shape[1]))
        early = sooner.any()
        sent = ends.copy() if early else ends
        for level, before, source, border, kind in self._levels.rows:
            ready = sent[source] + delays[border]
            ends[level] = np.maximum(ends[before], ready) + seconds[kind]
            if early:
                sent[level] = ends[level] - sooner[kind]
        return ends.max(axis=0)


def has_bandwidth(cluster: Cluster) -> bool:
    """Return True if a message may take time on its link besides the latency."""
    return any(
        link.message_bandwidth is not None for link in (cluster.link, *cluster.links, *cluster.network)
    )


def _levels(before: list[int], source: list[int]) -> Ints:
    """Return the level of each action: one more than the largest of those that it waits for."""
    waiting: list[list[int]] = [[] for _ in before]
    missing = [0] * len(before)
    for action, needs in enumerate(zip(before, source, strict=True)):
        for needed in needs:
            if needed >= 0:
                waiting[needed].append(action)
                missing[action] += 1
    level = [0] * len(before)
    ready = [action for action, count in enumerate(missing) if not count]
    for action in ready:  # which grows
        for other in waiting[action]:
            level[other] = max(level[other], level[action] + 1)
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return np.array(level, dtype=np.int64)
