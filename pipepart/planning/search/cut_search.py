"""Finds cuts of one candidate with short steps, a bound of the bottleneck, or the cut that comes nearest to fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np

from schedules.searching.clock import Clock, OutOfTime

from ...graph_partition.device_orders import distinct_orders
from ...units import counted
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem, order_spaces
from ..partition.local_search import EvaluatedCut, LocalSearch, proportional_borders
from ..partition.order_search import OrderSpaces, first_orders
from .candidate import Candidate

# Cuts times actions of the schedule that are evaluated for one candidate: about 10 ms. A fixed number, so that a
# candidate has the same plan whatever the other candidates are.
_EFFORT = 600_000
_MOST_ORDERED = 12  # devices that are not all alike, up to which their orders are counted
_LEAST_EVALUATED = 64  # cuts, of a schedule with very many actions

_Cut = tuple[Sequence[int], Sequence[int]]  # borders, and the device of each schedule row


class CutSearch:
    """Finds cuts of a candidate.

    Args:
        candidate: that is possible.
        clock: that every loop looks at; None for no limit.
    """

    def __init__(self, candidate: Candidate, clock: Clock | None = None) -> None:
        self._candidate, self._part, self._costs = candidate, candidate.part, candidate.costs
        self._constraints = self._part.request.constraints
        self._clock = clock or Clock()

    def best_cuts(self) -> tuple[list[EvaluatedCut], float]:
        """Return cuts that fit, the shortest step first, and a lower bound of the bottleneck; no cuts if none fits."""
        cuts, bound, _ = self._nearest_cuts()
        fitting = [cut for cut in cuts if not cut.deficit]
        # Where values skip stages the memory of a cut is an upper bound: the plan may still fit.
        return fitting or (cuts[:1] if self._costs.skips else []), bound

    def explain(self) -> Infeasible:
        """Explain why no plan fits, with the cut that comes nearest."""
        candidate = self._candidate
        if candidate.impossible_reason:
            where = f"schedule {candidate.schedule!r} on {counted(candidate.devices, 'device')}"
            return Infeasible(f"{where}: {candidate.impossible_reason}")
        cuts, _, tried_all = self._nearest_cuts()
        if not cuts:
            return Infeasible(
                f"no cut into {counted(candidate.stages, 'stage')} is possible: layers that share parameters or "
                "buffers, or that colocate names, are in one stage"
            )
        nearest = candidate.plan_of(cuts[0].borders, cuts[0].order, bound=0.0)
        exact = tried_all and not self._costs.skips  # whose memory has an upper bound here
        return explain_infeasible(nearest, int(cuts[0].deficit) if exact else None)

    def smallest_bottleneck(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck, for one stage a device; None if none fits.

        Raises:
            OutOfTime: the clock is over.
        """
        candidate, cut = self._candidate, self._bottleneck_without_limits()
        if cut is None or not candidate.is_limited:
            return cut
        # Candidates with as many devices share the cut without limits. If it fits, it is the best one.
        borders = np.array([cut.first_layers[1:]], dtype=np.int64).reshape(1, -1)
        modes, deficits = candidate.cut_costs.memory(borders, np.array([cut.device_indices]))
        if deficits[0] <= 0 and not modes.any():
            return cut
        key = "limited cut", id(self._costs), candidate.structure, candidate.choice
        return self._part.once(key, lambda: self._problem(limited=True).best())

    def step_with_least_bottleneck(self) -> float:
        """Return seconds that no plan can beat, as the device with the largest load computes for all micro-batches.

        0 where that proves nothing: with several stages a device, or backwards that are faster in parts.

        Raises:
            OutOfTime: the clock is over.
        """
        candidate, costs, cluster = self._candidate, self._costs, self._candidate.cluster
        faster_split = costs.split is not None and bool((costs.split < 0).any())
        if not candidate.is_plain or faster_split or candidate.choice in ("always", "except-last"):
            return 0.0
        cut = self._bottleneck_without_limits()
        if cut is None:
            return 0.0
        links = [cluster.link, *cluster.links, *cluster.network]
        transfers = np.array([costs.border_seconds(link) for link in links])
        compute = cut.bound - 2 * float(transfers[np.isfinite(transfers)].max())
        return (costs.micro_batches // self._part.groups.replicas) * compute

    def _nearest_cuts(self) -> tuple[list[EvaluatedCut], float, bool]:
        """Return cuts, those with the smallest deficit and of these the shortest step first.

        Every cut is evaluated on every order of the devices if they are few. Else a local search starts from the cut
        with the smallest bottleneck, or from stages in proportion to the speeds of their devices.

        Returns:
            The cuts, a lower bound of the bottleneck of those that fit, and True if every cut was evaluated.
        """
        candidate = self._candidate
        if candidate.impossible_reason or not candidate.has_cuts:
            return [], 0.0, False
        cut, is_within_limits = None, False
        if candidate.is_plain:
            with suppress(OutOfTime):
                cut = self._bottleneck_without_limits()
                if cut is None:
                    return [], 0.0, False
                # With a few orders of many the cut within the limits is no better than what the local search finds.
                if candidate.is_limited and self._spaces.all(candidate.devices):
                    cut, is_within_limits = self.smallest_bottleneck() or replace(cut, bound=0.0), True
        bound = cut.bound if cut else 0.0
        if self._tries_every_cut:
            return self._local_search().best_of_all(self._orders(_EFFORT)), bound, True
        climbed = self._climb(
            [(cut.first_layers[1:], cut.device_indices)] if cut else self._proportional_cuts()
        )
        if cut and not is_within_limits and climbed and climbed[0].deficit:
            with suppress(OutOfTime):
                if (cut := self.smallest_bottleneck()) is not None:
                    climbed = self._climb([(cut.first_layers[1:], cut.device_indices)])
        return climbed, bound, False

    def _bottleneck_without_limits(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck as if memory had no limit; None if no cut is possible."""
        recomputes = self._candidate.choice in ("always", "except-last")
        key = "cut", id(self._costs), self._candidate.devices, recomputes
        return self._part.once(key, lambda: self._problem(limited=False).best())

    def _problem(self, *, limited: bool) -> ChainProblem:
        """The dynamic program, with or without the limits of memory."""
        candidate = self._candidate
        return ChainProblem(
            self._costs,
            candidate.cluster,
            candidate.devices,
            candidate.cut_costs.counts,
            self._constraints,
            self._clock,
            self._spaces,
            limited=limited,
        )

    @property
    def _spaces(self) -> OrderSpaces:
        """The orders of the devices."""
        return self._part.once("spaces", lambda: order_spaces(self._candidate.cluster, self._costs.layers))

    @cached_property
    def _tries_every_cut(self) -> bool:
        """True if there are so few cuts and orders of the devices that each is evaluated."""
        candidate = self._candidate
        if candidate.devices > _MOST_ORDERED and len(self._spaces.types) > 1:
            return False
        cuts = math.comb(len(self._costs.allowed_borders), candidate.stages - 1)
        most = _EFFORT // (candidate.step_times.actions * max(cuts, 1))
        return len(self._orders(most + 1)) <= most if most else False

    def _orders(self, most: int) -> list[tuple[int, ...]]:
        """Return orders of the devices that cost different amounts; the first ``most``."""
        cluster, devices = self._candidate.cluster, self._candidate.devices
        return self._part.once(
            ("orders", devices, most), lambda: list(islice(distinct_orders(cluster, devices), most))
        )

    def _local_search(self) -> LocalSearch:
        candidate = self._candidate
        return LocalSearch(
            candidate.rows,
            self._costs.allowed_borders,
            self._constraints.keep_pins,
            self._spaces.types,
            candidate.evaluate,
            max(_EFFORT // candidate.step_times.actions, _LEAST_EVALUATED),
            self._clock,
        )

    def _climb(self, starts: Sequence[_Cut]) -> list[EvaluatedCut]:
        """Return the cuts that climbing from the best of some cuts passes, the best first."""
        if not starts:
            return []
        search = self._local_search()
        borders = np.array([borders for borders, _ in starts], dtype=np.int64).reshape(len(starts), -1)
        evaluated = search.evaluated(borders, np.array([order for _, order in starts], dtype=np.int64))
        return search.climb(evaluated[0]) if evaluated else []

    def _proportional_cuts(self) -> list[_Cut]:
        """Return cuts into stages in proportion to the speeds of their devices, on a few orders of these."""
        cuts: list[_Cut] = []
        cluster, allowed = self._candidate.cluster, self._costs.allowed_borders
        for order in first_orders(cluster, self._candidate.devices):
            speeds = [cluster.devices[order[row]].speed for row in self._candidate.rows]
            borders = proportional_borders(self._costs.compute_sums, allowed, speeds)
            borders = self._constraints.moved_to_pins(borders)
            if np.isin(borders, allowed).all() and (np.diff(borders) > 0).all():
                cuts.append((borders.tolist(), order))
        return cuts
