"""Finds the cut of a candidate with the shortest step, a lower bound of its bottleneck, and its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice

import numpy as np

from schedules.searching.clock import Clock, OutOfTime

from ...graph_partition.device_orders import distinct_orders
from ...units import counted
from ..costs.stage_memory import MODE_SETS
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem
from ..partition.local_search import EvaluatedCut, LocalSearch, proportional_borders
from ..plans.plan import Plan
from .candidate import Candidate

# Cuts times actions of the schedule to evaluate for each candidate: about 10 ms. It is fixed, so that the plan of a
# candidate does not depend on the other candidates.
_EFFORT = 600_000
_MOST_ORDERED = 12  # with more devices that are not all alike, never evaluate every order of them
_LEAST_EVALUATED = 64  # cuts to evaluate even if the schedule has very many actions


class CutSearch:
    """Finds cuts of a candidate.

    Args:
        candidate: the candidate to cut.
        clock: ends every loop; None for no limit.
    """

    def __init__(self, candidate: Candidate, clock: Clock | None = None) -> None:
        self._candidate, self._part, self._costs = candidate, candidate.part, candidate.costs
        self._clock = clock or Clock()

    def best_cut(self) -> EvaluatedCut | None:
        """Return the cut with the shortest step that fits.

        If no cut fits, return None; with skip connections the nearest cut, because its memory is an upper bound.
        """
        cut, _ = self._nearest_cut()
        return cut if cut is not None and (not cut.deficit or self._costs.skips) else None

    @property
    def deficit(self) -> float:
        """The memory in bytes that the nearest cut lacks; infinite if no cut is possible."""
        cut, _ = self._nearest_cut()
        return cut.deficit if cut else math.inf

    def with_bound(self, plan: Plan) -> Plan:
        """Return a plan of the candidate with the bound of its bottleneck, if it is known."""
        candidate, groups = self._candidate, self._part.groups
        chosen = groups.replicas > 1 or self._part.computing is not None
        if not candidate.is_plain or (chosen and not groups.identical):
            return plan  # other groupings or choices of the devices were not tried
        if candidate.is_limited and self._part.request.mode_choices != (candidate.choice,):
            return plan  # with other modes that the request allows, other cuts fit
        with suppress(OutOfTime):
            cut = self.smallest_bottleneck()
            bound = {"bottleneck_bound": cut.bound if cut else 0.0}
            return plan.model_copy(update={"prediction": plan.predicted.model_copy(update=bound)})
        return plan

    def explain(self) -> Infeasible:
        """Explain why no plan fits, with the cut whose memory deficit is smallest."""
        candidate = self._candidate
        if candidate.impossible_reason:
            where = f"schedule {candidate.schedule!r} on {counted(candidate.devices, 'device')}"
            return Infeasible(f"{where}: {candidate.impossible_reason}")
        cut, tried_all = self._nearest_cut()
        if cut is None:
            return Infeasible(
                f"no cut into {counted(candidate.stages, 'stage')} is possible: layers that share parameters or "
                "buffers, or that colocate names, are in one stage"
            )
        nearest = candidate.plan_of(cut.borders, cut.order)
        exact = tried_all and not self._costs.skips  # with skip connections memory is an upper bound
        return explain_infeasible(nearest, int(cut.deficit) if exact else None)

    def smallest_bottleneck(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck, for one stage per device; None if no cut fits.

        Raises:
            OutOfTime: the clock is over.
        """
        return self._part.once(("bottleneck", self._candidate), self._smallest_bottleneck)

    def _smallest_bottleneck(self) -> ChainCut | None:
        candidate, cut = self._candidate, self._bottleneck_without_limits()
        if cut is None or not candidate.is_limited:
            return cut
        # Candidates with as many devices share the cut without memory limits. If it fits, it is the best cut.
        borders = np.array([cut.first_layers[1:]], dtype=np.int64).reshape(1, -1)
        modes, deficits = candidate.cut_costs.memory(borders, np.array([cut.device_indices]))
        if deficits[0] <= 0 and not modes.any():
            return cut
        return self._problem(limited=True).best()

    def _nearest_cut(self) -> tuple[EvaluatedCut | None, bool]:
        return self._part.once(("nearest cut", self._candidate), self._find_nearest_cut)

    def _find_nearest_cut(self) -> tuple[EvaluatedCut | None, bool]:
        """Return the cut with the smallest memory deficit, then the shortest step; True if every cut was evaluated.

        If the cuts and orders of the devices are few, every cut is evaluated on every order. Otherwise a local search
        starts from the cut with the smallest bottleneck, or from stages in proportion to the speeds of their devices.
        """
        candidate = self._candidate
        if candidate.impossible_reason or not candidate.has_cuts:
            return None, False
        if self._tries_every_cut:
            return self._local_search().best_of_all(self._orders(_EFFORT)), True
        if not candidate.is_plain:
            return self._climb(self._proportional_cuts()), False
        cut: EvaluatedCut | None = None
        with suppress(OutOfTime):
            smallest = self._bottleneck_without_limits()
            if smallest is None:
                return None, False
            starts = [smallest]
            if candidate.is_limited:
                # A cut within the memory limits of one schedule is near those of all schedules on as many devices.
                key = "limited cut", candidate.devices, candidate.choice
                with suppress(OutOfTime):
                    shared = self._part.once(key, self.smallest_bottleneck)
                    starts += filter(None, [shared or self.smallest_bottleneck()])
            cut = self._climb(starts)
            if cut is not None and cut.deficit and (limited := self.smallest_bottleneck()) is not None:
                cut = self._climb([limited])
        return cut or self._climb(self._proportional_cuts()), False

    def _bottleneck_without_limits(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck without memory limits; None if no cut is possible."""
        recomputes = self._candidate.choice in ("always", "except-last")
        key = "cut", self._candidate.devices, recomputes
        return self._part.once(key, lambda: self._problem(limited=False).best())

    def _problem(self, *, limited: bool) -> ChainProblem:
        """Return the dynamic program, with or without memory limits."""
        candidate = self._candidate
        return ChainProblem(
            self._costs,
            self._part.spaces,
            candidate.devices,
            candidate.cut_costs.counts,
            self._clock,
            limited=limited,
        )

    @cached_property
    def _tries_every_cut(self) -> bool:
        """True if the cuts and orders of the devices are few enough to evaluate them all."""
        candidate = self._candidate
        if candidate.devices > _MOST_ORDERED and len(self._part.spaces.types) > 1:
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
            self._part.spaces.types,
            candidate.evaluate,
            max(_EFFORT // candidate.step_times.actions, _LEAST_EVALUATED),
            self._clock,
        )

    def _climb(self, starts: Sequence[ChainCut]) -> EvaluatedCut | None:
        """Climb from the best of these cuts; return the cut that is reached."""
        if not starts:
            return None
        search = self._local_search()
        borders = np.array([cut.first_layers[1:] for cut in starts], dtype=np.int64).reshape(len(starts), -1)
        orders = np.array([cut.device_indices for cut in starts], dtype=np.int64)
        start = search.best_of(borders, orders)
        return search.climb(start) if start else None

    def _proportional_cuts(self) -> list[ChainCut]:
        """Return cuts into stages in proportion to the speeds of their devices, for a few orders of the devices."""
        cuts: list[ChainCut] = []
        cluster, allowed = self._candidate.cluster, self._costs.allowed_borders
        for order in self._part.spaces.few(self._candidate.devices):
            speeds = [cluster.devices[order[row]].speed for row in self._candidate.rows]
            borders = proportional_borders(self._costs.compute_sums, allowed, speeds)
            cuts.append(ChainCut((0, *borders.tolist()), order, 0.0))
        return cuts


def plan_of_cut(candidate: Candidate, cut: EvaluatedCut) -> Plan | None:
    """Return the plan of a cut; None if it does not fit.

    Cuts count memory as if all stages took equal times. In the simulated step of a plan more messages may wait. If the
    plan does not fit for that reason, devices without enough memory switch to modes that need less.
    """
    plan = candidate.plan_of(cut.borders, cut.order)
    modes = MODE_SETS[candidate.choice]
    for _ in modes[1:]:
        needs = zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
        short = {device.name for device, need in needs if need > device.memory}
        if not short:
            break
        homes = zip(*[[stage.device for stage in plan.stages], *plan.replica_devices], strict=True)
        stages = [
            stage.with_mode(modes[min(modes.index(stage.mode) + 1, len(modes) - 1)])
            if short.intersection(names) and stage.backward_seconds
            else stage
            for stage, names in zip(plan.stages, homes, strict=True)
        ]
        plan = plan.model_copy(update={"stages": tuple(stages)}).predict(candidate.costs)
    return plan if plan.fits else None
