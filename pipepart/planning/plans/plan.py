"""Plan: the stages of a model, their devices, schedule and predicted costs; validated on creation and on load."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

from ...document import fault_texts
from ...input_error import InputError
from ...pages import notebook_html, to_html
from ..export import Export, export_plan
from .plan_faults import memory_faults, structure_faults
from .plan_record import PlanRecord


class Plan(PlanRecord):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        kind: of the file.
        stages: in pipeline order.
        cluster: the devices that the stages run on.
        schedule: name of the schedule, or ``"search"``.
        micro_batches: number of micro-batches of a mini-batch.
        chunks: number of stages per device; the schedule determines which stages. Ignored under ``"search"``.
        actions: if the schedule is ``"search"``, the actions of each device in order, in the notation of
            ``schedules.Action``, for one replica and without recomputes. Devices may have different numbers of stages.
        split_critical: backwards on the critical path that run as I, then W, in the notation of ``actions``. I sends
            the gradient of the stage's input before W computes the weight gradients. All replicas split the same
            backwards. Ignored if the schedule is built for another number of micro-batches.
        replica_devices: for each replica after the first, the device name of each stage. Each micro-batch runs through
            one replica; gradients are summed over replicas.
        prediction: None for a plan written by hand.
        fingerprint: of the profile's layers; empty for a plan written by hand.
        outputs: of the model for one micro-batch, as profiled.
        profile: the layers and their costs at this micro-batch size; None for a plan written by hand.
        alternatives: other plans that were considered, fastest first.
        out_of_time: True if the time limit ``seconds`` ended the search. A larger limit or an idle machine may give a
            shorter step.
        constraints: the keywords of :func:`pipepart.plan` that the plan was requested with.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if faults := list(structure_faults(self)):
            raise InputError("\n  ".join(faults))
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan file that :meth:`save` wrote, edited or not, and recompute the predictions of its stages.

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
            raise InputError(
                f"{path} holds a plan whose costs are too large:\n  " + "\n  ".join(faults)
            ) from None
        if faults := list(memory_faults(read)):
            raise InputError(f"{path} holds a plan that does not fit its devices:\n  " + "\n  ".join(faults))
        return read

    def export(self, engine: str) -> Export:
        """Return the plan in the files of another engine; ``save(folder)`` of the result writes them.

        Args:
            engine: "torch-pipelining", "torchtitan", "megatron" or "deepspeed".

        Raises:
            ValueError: no engine has this name, or the engine cannot run the plan. Lists every reason, and what to plan
                instead.
        """
        return export_plan(self, engine)

    def to_html(self) -> str:
        """Return the plan and its predicted step as an HTML page that needs no other file and no network."""
        return to_html(self)

    def _repr_html_(self) -> str:
        """Show the stages, their memory and the predicted timeline in a notebook."""
        return notebook_html(self)
