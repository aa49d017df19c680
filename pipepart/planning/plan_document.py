"""Plan: which layers run where, in what order, and the predicted cost."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from ..document import fault_texts
from .plan_checks import memory_faults, structure_faults
from .plan_record import PlanRecord


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
