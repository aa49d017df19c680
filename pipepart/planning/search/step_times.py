"""Simulates one training step for many cuts of a chain at once, all under the same schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import schedules
from schedules import Kind
from schedules.core.dependencies import CODE, Dependencies, dependencies

from ...cluster import Cluster
from ..costs.cut_costs import Borders, CutCosts
from ..costs.layer_ranges import split_share
from ..costs.stage_memory import RECOMPUTES, Floats, Ints

_MOST_ENDS = 4_000_000  # ends of actions in memory at a time; it limits the cuts that are simulated at once

_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE)

# Costs of cuts on orders of the devices: seconds [rows of seconds, cuts], and delays [borders + 1, cuts].
Columns = tuple[Floats, Floats]


class Levels:
    """The actions of a schedule sorted into levels. An action waits only for actions of earlier levels.

    If messages take time on their link, each message is an action, too. A direction of a link carries one message at a
    time, so it has a row of actions like a device.

    Args:
        schedule: the schedule of one replica, without recomputes.
        scale: [micro-batches]: seconds relative to the mean; empty if all micro-batches have the same size.
        may_recompute: insert a recompute before each backward. It takes no time in stages that do not recompute.
        on_links: messages take time on their link.
    """

    def __init__(
        self, schedule: schedules.Schedule, scale: Sequence[float], may_recompute: bool, on_links: bool
    ) -> None:
        bare = schedules.split_overlaps(schedule)
        if may_recompute:
            bare = schedules.insert_recompute(bare, range(bare.stages), range(bare.micro_batches))
        graph, stages = dependencies(bare), bare.stages
        self._before = np.arange(-1, graph.actions - 1)
        self._before[np.array(graph.offsets[:-1])] = -1  # row -1 of the ends is zero: the start of the step
        self._source = np.full(graph.actions, -1)
        self._source[graph.target] = graph.source
        self._border = np.full(graph.actions, stages - 1)  # the last row of delays is zero
        self._border[graph.target] = np.minimum(graph.source_stage, graph.target_stage)
        row = np.full(len(CODE), -1)
        row[[CODE[kind] for kind in _KINDS]] = np.arange(len(_KINDS))
        kind = row[graph.code]
        last = (graph.code == CODE[Kind.RECOMPUTE]) & (graph.micro_batch == bare.micro_batches - 1)
        zero_row = (len(_KINDS) + 1) * stages
        self._seconds = np.where(kind < 0, zero_row, (kind + last) * stages + graph.stage)
        self._scale = np.ones((graph.actions, 1))
        if scale:
            self._scale[kind >= 0, 0] = np.array(scale)[graph.micro_batch[kind >= 0]]
        if on_links:
            self._add_messages(graph, np.array(bare.device_of), zero_row + 1)
        self.actions = self._source.size
        level_of = _levels(self._before, self._source)
        self.rows = [
            (
                level,
                self._before[level],
                self._source[level],
                self._border[level],
                self._seconds[level],
                self._scale[level] if scale else None,
            )
            for level in np.split(np.argsort(level_of, kind="stable"), np.cumsum(np.bincount(level_of))[:-1])
        ]

    def _add_messages(self, graph: Dependencies, row_of: Ints, first_row: int) -> None:
        """Add an action for each message between devices. Its seconds are in row ``first_row`` plus its border."""
        rows = row_of[graph.source_stage], row_of[graph.target_stage]
        edges = np.flatnonzero(rows[0] != rows[1])
        link = (rows[0] * (row_of.max() + 1) + rows[1])[edges]
        order = np.lexsort((graph.source[edges], link))
        edges, link = edges[order], link[order]
        target, numbers = graph.target[edges], graph.actions + np.arange(edges.size)
        border = self._border[target]
        follows = np.r_[False, link[1:] == link[:-1]]
        self._before = np.r_[self._before, np.where(follows, numbers - 1, -1)]
        self._source = np.r_[self._source, graph.source[edges]]
        self._source[target] = numbers
        self._border = np.r_[self._border, np.full(edges.size, row_of.size - 1)]
        self._seconds = np.r_[self._seconds, first_row + border]
        self._scale = np.r_[self._scale, np.ones((edges.size, 1))]


class StepTimes:
    """Computes the seconds of one step, as :func:`schedules.simulate` does, for many cuts and device orders at once.

    A few array operations simulate a level of actions for all cuts::

        end[action] = max(end[action before it on its device], end[its source] + delay) + seconds

    It assumes that messages do not wait for ports of hosts, and that values that skip stages arrive in time: they leave
    before the output of the previous stage.

    Args:
        cuts: has the layers, the devices, the schedule rows and the recompute modes.
        levels: the levels of the schedule; with recomputes and messages if the cuts may have some.
    """

    def __init__(self, cuts: CutCosts, levels: Levels) -> None:
        self._cuts, self._levels = cuts, levels
        devices = cuts.cluster.devices
        self._speed = np.array([device.speed for device in devices])
        self._action = np.array([device.action_seconds for device in devices])

    @property
    def actions(self) -> int:
        """The number of actions of a step, with its messages if they take time."""
        return self._levels.actions

    def of(self, borders: Borders, modes: Ints, orders: Ints) -> Floats:
        """Return the seconds of a step of each cut: [cuts].

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
            modes: the index of the mode of each schedule row: [cuts, rows].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].
        """
        width = max(1, _MOST_ENDS // (self._levels.actions + 1))
        parts = [slice(first, first + width) for first in range(0, len(borders), width)]
        tables = (self._columns(borders[part], modes[part], orders[part]) for part in parts)
        return np.concatenate([self._step(*table) for table in tables] or [np.zeros(0)])

    def _columns(self, borders: Borders, choices: Ints, orders: Ints) -> Columns:
        """Return the seconds and delays of cuts. The seconds of messages on links count as seconds, not as delays."""
        cuts, costs = self._cuts, self._cuts.costs
        edges = costs.edges(borders)
        homes = orders[:, cuts.rows]
        copied = np.arange(len(cuts.rows)) % cuts.stages  # the stage of each stage of all copies of the model
        forward, inputs, weights, split = (
            np.diff(costs.sums[:, edges], axis=2)[..., copied] / self._speed[homes]
        )
        backward = inputs + weights
        share = split_share(split, backward)
        modes = np.array(cuts.modes)[choices][:, cuts.rows]
        repeated = np.where(costs.has_backward[edges[:, 1:] - 1][:, copied], forward, 0.0)
        action = self._action[homes]
        latency, per_byte = cuts.links(homes[:, :-1], homes[:, 1:])
        zeros = np.zeros((len(borders), 1))
        sizes = np.hstack([costs.message_bytes(borders), zeros])[:, copied[:-1]]
        tables = (
            forward + action,
            inputs * share + action,
            weights * share + action,
            backward + action,
            np.where(np.isin(modes, list(RECOMPUTES)), repeated + action, 0.0),
            np.where(modes == "always", repeated + action, 0.0),  # of the last micro-batch
            zeros,
            sizes * per_byte,
        )
        return np.hstack(tables).T, np.hstack((latency, zeros)).T

    def _step(self, seconds: Floats, delays: Floats) -> Floats:
        ends = np.zeros((self._levels.actions + 1, seconds.shape[1]))
        for level, before, source, border, kind, scale in self._levels.rows:
            lengths = seconds[kind] if scale is None else seconds[kind] * scale
            ends[level] = np.maximum(ends[before], ends[source] + delays[border]) + lengths
        return ends.max(axis=0)


def has_bandwidth(cluster: Cluster) -> bool:
    """Return True if some link has a bandwidth, so that messages take time on it besides the latency."""
    return any(link.seconds_per_byte > 0 for link in (cluster.link, *cluster.links, *cluster.network))


def _levels(before: Ints, source: Ints) -> Ints:
    """Return the level of each action: one more than the highest level of the actions that it waits for."""
    followers: list[list[int]] = [[] for _ in before]
    for earlier in (before, source):
        for action in np.flatnonzero(earlier >= 0).tolist():
            followers[earlier[action]].append(action)
    level, waits_for = [0] * len(before), ((before >= 0).astype(int) + (source >= 0)).tolist()
    ready = [action for action, count in enumerate(waits_for) if not count]
    for action in ready:  # grows meanwhile
        for follower in followers[action]:
            level[follower] = max(level[follower], level[action] + 1)
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    return np.array(level)
