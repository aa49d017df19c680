"""Simulates one step of many cuts of a chain at once, under one schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

import schedules
from schedules import Kind
from schedules.core.dependencies import CODE, dependencies

from ..costs.cut_costs import Borders, CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import Floats

_NUMBERS = 4_000_000  # that are held at a time: ends of actions, for as many cuts as that allows

# A cut with its order of the devices, as columns: seconds [kinds * stages + 1, cuts], and delays [borders + 1, cuts].
Columns = tuple[Floats, Floats]


class StepTimes:
    """Seconds of one step as :func:`schedules.simulate` has them, for many cuts and orders of the devices at once.

    The actions fall into levels: if every action took a second, those of a level would end at the same time. So an
    action waits for actions of earlier levels only, and a level is played with a few operations on arrays::

        end[action] = max(end[action before it on its device], end[its source] + delay) + seconds

    Values that go past stages are taken to be there in time: they left before the output of the stage before.

    Args:
        costs: of the layers.
        cuts: the devices, the schedule rows, and the recompute modes.
        schedule: of one replica, without recomputes.
    """

    def __init__(self, costs: ChainCosts, cuts: CutCosts, schedule: schedules.Schedule) -> None:
        self._costs, self._cuts = costs, cuts
        bare = schedules.split_overlaps(schedule)
        if cuts.may_recompute:  # a recompute that a stage does not need takes no time
            bare = schedules.insert_recompute(bare, range(bare.stages), range(bare.micro_batches))
        found, stages = dependencies(bare), bare.stages
        ones = [1.0] * stages
        unit = schedules.StageCosts(ones, ones, ones, optimizer_step=ones)
        ends = np.concatenate(schedules.simulate(bare, unit).ends)
        self._levels = np.split(np.argsort(ends, kind="stable"), np.flatnonzero(np.diff(np.sort(ends))) + 1)
        self._actions = found.actions
        self._before = np.arange(-1, found.actions - 1)
        self._before[np.array(found.offsets[:-1])] = -1  # row -1 of the ends is zero: the start of the step
        self._source = np.full(found.actions, -1)
        self._source[found.target] = found.source
        self._border = np.full(found.actions, stages - 1)  # the last row of delays is zero
        self._border[found.target] = np.minimum(found.source_stage, found.target_stage)
        kinds = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE)
        row = np.full(len(CODE), -1)
        row[[CODE[kind] for kind in kinds]] = np.arange(len(kinds))
        kind = row[found.code]
        last = (found.code == CODE[Kind.RECOMPUTE]) & (found.micro_batch == bare.micro_batches - 1)
        self._seconds = np.where(kind < 0, (len(kinds) + 1) * stages, (kind + last) * stages + found.stage)

    def columns(self, borders: Borders, choices: Borders, order: Sequence[int]) -> Columns:
        """Return the seconds and delays of cuts on one order of the devices.

        Args:
            borders: [cuts, borders].
            choices: [cuts, devices], the recompute mode of each device, by its index.
            order: the device of each schedule row.
        """
        costs, cluster = self._costs, self._cuts.cluster
        edges = costs.edges(borders)
        homes = [cluster.devices[order[row]] for row in self._cuts.rows]
        speeds = np.array([device.speed for device in homes])
        forward, inputs, weights, split = np.diff(costs.sums[:, edges], axis=2) / speeds
        backward = inputs + weights
        share = np.maximum(0.0, 1 + np.divide(split, backward, np.zeros_like(split), where=backward > 0))
        modes = np.array(self._cuts.modes)[choices][:, self._cuts.rows]
        repeated = np.where(costs.has_backward[edges[:, 1:] - 1], forward, 0.0)
        action = np.array([device.action_seconds for device in homes])
        tables = (
            forward + action,
            inputs * share + action,
            weights * share + action,
            backward + action,
            np.where(modes != "never", repeated + action, 0.0),
            np.where(modes == "always", repeated + action, 0.0),  # of the last micro-batch
            np.zeros((len(borders), 1)),
        )
        delays = np.zeros((len(borders), len(homes)))
        sizes = self._cuts.crossings(order).message_bytes(borders)
        for border, (one, other) in enumerate(itertools.pairwise(homes)):
            if one != other:
                link = cluster.link_between(one.name, other.name)
                delays[:, border] = link.latency + (
                    sizes[:, border] / link.bandwidth if link.bandwidth else 0.0
                )
        return np.hstack(tables).T, delays.T

    def steps(self, columns: Sequence[Columns]) -> Floats:
        """Return the seconds of a step of each cut of all columns, one after the other."""
        seconds, delays = (np.hstack(tables) for tables in zip(*columns, strict=True))
        width = max(1, _NUMBERS // (self._actions + 1))
        parts = [slice(first, first + width) for first in range(0, seconds.shape[1], width)]
        return np.concatenate([self._played(seconds[:, part], delays[:, part]) for part in parts])

    def _played(self, seconds: Floats, delays: Floats) -> Floats:
        ends = np.zeros((self._actions + 1, seconds.shape[1]))
        for level in self._levels:
            ready = ends[self._source[level]] + delays[self._border[level]]
            ends[level] = np.maximum(ends[self._before[level]], ready) + seconds[self._seconds[level]]
        return ends.max(axis=0)
