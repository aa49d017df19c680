"""Finds the cuts of a candidate with the shortest steps, and a lower bound of its bottleneck."""

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

# Cuts times actions of the schedule to evaluate for each candidate: about 10 ms. It is fixed, so that the plan of a
# candidate does not depend on the other candidates.
_EFFORT = 600_000
_MOST_ORDERED = 12  # with more devices that are not all alike, never evaluate every order of them
_LEAST_EVALUATED = 64  # cuts to evaluate even if the schedule has very many actions

_Cut = tuple[Sequence[int], Sequence[int]]  # borders, and the device of each schedule row


class CutSearch:
    """Finds cuts of a candidate.

    Args:
        candidate: the candidate to cut.
        clock: ends every loop; None for no limit.
    """

    def __init__(self, candidate: Candidate, clock: Clock | None = None) -> None:
        self._candidate, self._part, self._costs = candidate, candidate.part, candidate.costs
        self._constraints = self._part.request.constraints
        self._clock = clock or Clock()

    def best_cuts(self) -> tuple[list[EvaluatedCut], float]:
        """Return cuts that fit, the shortest step first, and a lower bound of the bottleneck.

        If no cut fits there are no cuts, except with skip connections or replicas: then the nearest cut is returned.
        """
        cuts, bound, _ = self._nearest_cuts()
        fitting = [cut for cut in cuts if not cut.deficit]
        # The memory of a cut is then an upper bound, so its plan may still fit: skipping values are estimated, and
        # only the first replica holds optimizer state, on the device with the most memory of its group.
        return fitting or (cuts[:1] if self._costs.skips or self._part.groups.replicas > 1 else []), bound

    def explain(self) -> Infeasible:
        """Explain why no plan fits, with the cut whose memory deficit is smallest."""
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
        exact = tried_all and not self._costs.skips  # with skip connections memory is an upper bound
        return explain_infeasible(nearest, int(cuts[0].deficit) if exact else None)

    def smallest_bottleneck(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck, for one stage per device; None if no cut fits.

        Raises:
            OutOfTime: the clock is over.
        """
        candidate, cut = self._candidate, self._bottleneck_without_limits()
        if cut is None or not candidate.is_limited:
            return cut
        # Candidates with as many devices share the cut without memory limits. If it fits, it is the best cut.
        borders = np.array([cut.first_layers[1:]], dtype=np.int64).reshape(1, -1)
        modes, deficits = candidate.cut_costs.memory(borders, np.array([cut.device_indices]))
        if deficits[0] <= 0 and not modes.any():
            return cut
        key = "limited cut", id(self._costs), candidate.structure, candidate.choice
        return self._part.once(key, lambda: self._problem(limited=True).best())

    def _nearest_cuts(self) -> tuple[list[EvaluatedCut], float, bool]:
        """Return cuts sorted by memory deficit, then by step.

        If the cuts and orders of the devices are few, every cut is evaluated on every order. Otherwise a local search
        starts from the cut with the smallest bottleneck, or from stages in proportion to the speeds of their devices.

        Returns:
            The cuts, a lower bound of the bottleneck of all cuts that fit, and True if every cut was evaluated.
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
                # If only some orders can be searched, the local search finds cuts within the limits that are as good.
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
        """Return the cut with the smallest bottleneck without memory limits; None if no cut is possible."""
        recomputes = self._candidate.choice in ("always", "except-last")
        key = "cut", id(self._costs), self._candidate.devices, recomputes
        return self._part.once(key, lambda: self._problem(limited=False).best())

    def _problem(self, *, limited: bool) -> ChainProblem:
        """Return the dynamic program, with or without memory limits."""
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
        """The orders of the devices to search."""
        return self._part.once("spaces", lambda: order_spaces(self._candidate.cluster, self._costs.layers))

    @cached_property
    def _tries_every_cut(self) -> bool:
        """True if the cuts and orders of the devices are few enough to evaluate them all."""
        candidate = self._candidate
        if candidate.devices > _MOST_ORDERED and len(self._spaces.types) > 1:
            return False
        cuts = math.comb(len(self._costs.allowed_borders), candidate.stages - 1)
        most = _EFFORT // (candidate.step_times.actions * max(cuts, 1))
        return len(self._orders(most + 1)) <= most if most else False

    def _orders(self, most: int) -> list[tuple[int, ...]]:
        """Return up to ``most`` orders of the devices, without orders that only exchange alike devices."""
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
        """Climb from the best of these cuts; return the cuts on the way, the best first."""
        if not starts:
            return []
        search = self._local_search()
        borders = np.array([borders for borders, _ in starts], dtype=np.int64).reshape(len(starts), -1)
        evaluated = search.evaluated(borders, np.array([order for _, order in starts], dtype=np.int64))
        return search.climb(evaluated[0]) if evaluated else []

    def _proportional_cuts(self) -> list[_Cut]:
        """Return cuts into stages in proportion to the speeds of their devices, for a few orders of the devices."""
        cuts: list[_Cut] = []
        cluster, allowed = self._candidate.cluster, self._costs.allowed_borders
        for order in first_orders(cluster, self._candidate.devices):
            speeds = [cluster.devices[order[row]].speed for row in self._candidate.rows]
            borders = proportional_borders(self._costs.compute_sums, allowed, speeds)
            borders = self._constraints.moved_to_pins(borders)
            if np.isin(borders, allowed).all() and (np.diff(borders) > 0).all():
                cuts.append((borders.tolist(), order))
        return cuts
