"""Plan: which layers run where, in what order, and the predicted cost."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from ..cluster import Cluster
from ..document import fault_texts
from .costs.layer_ranges import ChainCosts
from .costs.stage_memory import StashCounts
from .plan_checks import memory_faults, structure_faults
from .plan_record import PlanRecord, Prediction
from .prediction import Piece, stage_plans
from .stage_plan import TOLERANCE


class Plan(PlanRecord):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        stages: in pipeline order.
        cluster: the devices that the stages run on.
        schedule: its name, or ``"search"``.
        micro_batches: the number of parts of a mini-batch.
        chunks: stages of each device; the schedule determines which. Ignored under ``"search"``.
        actions: the order of actions of each device if the schedule is ``"search"``, in the notation of
            ``schedules.Action``: of one replica, without recomputes. Devices may have different numbers of stages.
        split_critical: full backwards on the critical path that run as their two parts (I, then W), so that the
            gradient of the stage's input leaves before its weight gradients are computed. Ignored for another number
            of micro-batches than the plan's.
        replica_devices: the devices of each further replica of the model, one name a stage. Each micro-batch runs
            through one replica; gradients are summed over replicas.
        prediction: None for a plan written by hand.
        fingerprint: of the profile's layers; empty for a plan written by hand.
        outputs: of the model for one micro-batch, as profiled.
        profile: the layers and their costs at this micro-batch size; None for a plan written by hand.
        edges: of a model with branches, the pairs of layers ``(a, b)`` such that b uses the output of a; empty for a
            chain. ``profile`` then has what crosses the border behind each layer as that layer's output.
        alternatives: the other plans that were considered, the fastest first.
        constraints: what the user asked of the cut.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        faults = structure_faults(self)
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that :meth:`save` wrote, edited or not. The figures of its stages are computed anew.

        Raises:
            ValueError: the file is not a plan of this version, or the plan is impossible: a layer is missing, unknown
                or in two stages, a stage is not connected, or a device has too little memory. Lists every fault.
            OSError: the file cannot be read.
        """
        read = super().load(path)
        try:
            read = read.refreshed()
        except (ValueError, ArithmeticError) as error:
            faults = fault_texts(error) if isinstance(error, ValidationError) else [str(error)]
            raise ValueError(
                f"{path} holds a plan whose costs are too large:\n  " + "\n  ".join(faults)
            ) from None
        faults = memory_faults(read)
        if faults:
            raise ValueError(f"{path} holds a plan that does not fit its devices:\n  " + "\n  ".join(faults))
        return read

    def refreshed(self) -> Self:
        """Return the plan with the figures of its stages and its prediction computed from its profile.

        The bound and the alternatives are kept only if nothing was edited.
        """
        if self.profile is None:
            return self
        costs = ChainCosts(self.profile, self.profile.at(self.micro_batches))
        index = {info.name: position for position, info in enumerate(self.profile.layers)}
        pieces = [
            Piece(slice(index[stage.layers[0]], index[stage.layers[-1]] + 1), stage.device, stage.recompute)
            for stage in self.stages
        ]
        counts = StashCounts(self.build_schedule())
        stages = stage_plans(self.profile, costs, self.cluster, pieces, counts.by_stage, counts.older)
        fresh = self.model_copy(update={"stages": stages})
        found = fresh.predict(costs.total_seconds)
        kept = self.prediction
        if (
            kept is not None
            and stages == self.stages
            and found == kept.model_copy(update={"bottleneck_bound": 0.0})
            and kept.bottleneck_bound <= found.bottleneck_seconds * (1 + TOLERANCE)
        ):
            return self
        return fresh.model_copy(update={"prediction": found, "alternatives": ()})

    def predict(self, micro_batch_seconds: float, bottleneck_bound: float = 0.0) -> Prediction:
        """Simulate one step.

        Args:
            micro_batch_seconds: of one micro-batch on one device like the profiled one.
            bottleneck_bound: no cut has a smaller bottleneck.
        """
        timeline = self.simulate()
        loads: dict[tuple[int, str], float] = {}
        for number, stage in enumerate(self.all_stages):
            key = number // len(self.stages), stage.device
            loads[key] = loads.get(key, 0.0) + stage.load_seconds
        unused = dict.fromkeys((device.name for device in self.cluster.devices), 0)
        return Prediction(
            step_seconds=timeline.makespan,
            memory_bytes=tuple({**unused, **self.device_bytes(timeline)}.values()),
            bubble=timeline.bubble,
            bottleneck_seconds=max(loads.values()),
            bottleneck_bound=bottleneck_bound,
            serial_seconds=micro_batch_seconds * self.micro_batches,
            found_for=_digest(self.cluster),
        )


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16]
