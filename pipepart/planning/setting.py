"""One way to run a model, all but the cut: a schedule, a number of micro-batches, what may be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import schedules

from ..cluster import Cluster
from ..profiling import Profile
from ..units import format_bytes
from .chain import ChainCut, ChainProblem
from .chunks import ChunkedProblem
from .figures import Piece, stage_plans
from .memory import MODES, RecomputeChoice
from .misfit import Misfit
from .plan import Plan
from .stage_costs import ChainCosts
from .wishes import Wishes

# The stages of each device under the schedules that plans are made for; with None the schedule has one.
CHUNKS: dict[str, int | None] = {
    "1f1b": None,
    "gpipe": None,
    "sequential": None,
    "eager-1f1b": None,
    "zb-h1": None,
    "zb-h2": None,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "interleaved-zb": 2,
    "hanayo": 2,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
}


@dataclass(frozen=True)
class Setting:
    """A setting: makes the best plan for so many devices, or says why there is none.

    Attributes:
        profile: the layers.
        cluster: the devices.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        recompute: what stages may do.
        wishes: of the user.
    """

    profile: Profile
    cluster: Cluster
    costs: ChainCosts
    schedule: str
    chunks: int
    recompute: RecomputeChoice
    wishes: Wishes

    def why_not(self, devices: int) -> str:
        """Why there is no such cut, whatever the memory; empty where that is not known."""
        stages = devices * self.chunks
        if self.chunks > 1 and devices == 1:
            return "several stages on one device alone gain nothing"
        if stages > self.costs.layers:
            return f"{stages} stages, and the model has {self.costs.layers} layers"
        if self.wishes.stages not in (None, stages):
            return f"{stages} stages, and cut_before makes {self.wishes.stages}"
        if any(stage >= stages for stage in self.wishes.pins.values()):
            return f"pin has a layer in stage {max(self.wishes.pins.values())}, and there are {stages} stages"
        try:
            _built(self.schedule, devices, self.costs.micro_batches, self.chunks)
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    def best_plan(self, devices: int) -> Plan | None:
        """The plan whose bottleneck is smallest, None where none fits."""
        if self.why_not(devices):
            return None
        if self.chunks > 1:
            cut = self._chunked(devices).best()
            if cut is None or cut.short_bytes:
                return None
            modes = [cut.recompute] * len(cut.starts)
            return self._if_it_fits(self._plan(cut.starts, cut.sites, modes, devices, cut.bound))
        problem = self._chain(devices)
        found = problem.best()
        if found is None:
            return None
        bound = found.worst if found.optimal else 0.0
        return self._if_it_fits(self._plan(found.starts, found.sites, problem.modes(found), devices, bound))

    def laid(self, starts: Sequence[int], sites: Sequence[int], devices: int, bound: float) -> Plan | None:
        """The plan of one cut, None where it does not fit.

        Args:
            starts: first layer of each stage.
            sites: device of each, by its position in the cluster.
            devices: how many different ones.
            bound: what no cut of the setting has a smaller bottleneck than.
        """
        if self.chunks == 1:
            modes = self._chain(devices).modes(ChainCut(tuple(starts), tuple(sites), 0.0, False))
            return self._if_it_fits(self._plan(starts, sites, modes, devices, bound))
        for mode in MODES[self.recompute]:
            made = self._if_it_fits(self._plan(starts, sites, [mode] * len(starts), devices, bound))
            if made is not None:
                return made
        return None

    def _if_it_fits(self, made: Plan) -> Plan | None:
        """The plan, unless its simulation holds more than the search counted with.

        It may where forwards run again: a schedule that splits its backward, or has several stages a device, can hold
        more whole stashes at once than are counted then.
        """
        limits = (
            (self.cluster.device(name).memory_bytes, need) for name, need in made.device_bytes().items()
        )
        return None if any(limit is not None and need > limit for limit, need in limits) else made

    def misfit(self, devices: int) -> Misfit:
        """Why no plan for so many devices fits, told by the cut that comes nearest."""
        reason = self.why_not(devices)
        if reason:
            return Misfit(f"schedule {self.schedule!r} on {devices} devices: {reason}", None, 0, 0)
        if self.chunks > 1:
            cut = self._chunked(devices).best()
            draft = cut and self._plan(cut.starts, cut.sites, [cut.recompute] * len(cut.starts), devices, 0.0)
            return self._told(draft, cut.short_bytes if cut else 0, devices)
        problem = self._chain(devices)
        found = problem.nearest()
        draft = found and self._plan(found.starts, found.sites, problem.modes(found), devices, 0.0)
        return self._told(draft, int(found.worst) if found else 0, devices)

    def _chain(self, devices: int) -> ChainProblem:
        built = _built(self.schedule, devices, self.costs.micro_batches, 1)
        return ChainProblem(
            self.costs,
            self.cluster,
            devices,
            schedules.in_flight(built)[::-1],
            self.recompute,
            self.wishes.places(devices),
        )

    def _chunked(self, devices: int) -> ChunkedProblem:
        built = _built(self.schedule, devices, self.costs.micro_batches, self.chunks)
        return ChunkedProblem(self.costs, self.cluster, built, self.recompute, self.wishes)

    def _plan(
        self,
        starts: Sequence[int],
        sites: Sequence[int],
        modes: Sequence[str],
        devices: int,
        bound: float,
    ) -> Plan:
        ends = [*starts[1:], self.costs.layers]
        pieces = [
            Piece(
                slice(start, end),
                self.cluster.devices[site].name,
                mode if self.costs.needs_backward(slice(start, end)) else "never",  # type: ignore[arg-type]
            )
            for start, end, site, mode in zip(starts, ends, sites, modes, strict=True)
        ]
        built = _built(self.schedule, devices, self.costs.micro_batches, self.chunks)
        stages = stage_plans(self.profile, self.costs, self.cluster, pieces, schedules.in_flight(built))
        draft = Plan.model_construct(
            stages=stages,
            cluster=self.cluster,
            schedule=self.schedule,
            micro_batches=self.costs.micro_batches,
            chunks=self.chunks,
            fingerprint=self.profile.fingerprint,
            outputs=self.profile.outputs,
            profile=self.profile,
        )
        return draft.model_copy(update={"prediction": draft.predict(self.costs.total_seconds, bound)})

    def _told(self, draft: Plan | None, short: int, devices: int) -> Misfit:
        stages = devices * self.chunks
        if draft is None:
            return Misfit(
                f"no cut into {stages} stages is possible: layers that share parameters or buffers, or that are to "
                "stay together, are in one stage",
                None,
                0,
                0,
            )
        needs = draft.device_bytes()
        lacks = {
            name: need - (draft.cluster.device(name).memory_bytes or need) for name, need in needs.items()
        }
        name = max(lacks, key=lambda name: lacks[name])
        index, stage = max(
            ((index, stage) for index, stage in enumerate(draft.stages) if stage.device == name),
            key=lambda entry: entry[1].memory_bytes,
        )
        limit = draft.cluster.device(name).memory_bytes or 0
        again = "" if stage.recompute == "never" else f" (its forward run again, {stage.recompute!r})"
        return Misfit(
            f"with {stages} stages, {self.costs.micro_batches} micro-batches and schedule "
            f"{self.schedule!r}, stage {index} (layers {stage.layers[0]} to {stage.layers[-1]}) on {name} is "
            f"short by {short} bytes at best: it needs {limit + short} ({format_bytes(limit + short)}: "
            f"{format_bytes(stage.static_bytes)} of parameters, gradients and optimizer state, "
            f"{format_bytes(stage.kept_bytes)} kept for the backward of {stage.in_flight} micro-batches{again}, "
            f"{format_bytes(stage.transient_bytes)} for a while) and has {limit} ({format_bytes(limit)})",
            draft,
            index,
            short,
        )


@lru_cache(maxsize=256)
def _built(name: str, devices: int, micro_batches: int, chunks: int) -> schedules.Schedule:
    return schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)
