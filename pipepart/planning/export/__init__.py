"""Exports a plan to the pipeline configuration of other engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...input_error import InputError
from ..plans.plan_record import PlanRecord
from . import deepspeed, megatron, torch_pipelining, torchtitan
from .conditions import faults_of, notes_of
from .engine import Engine, Export

__all__ = ["ENGINES", "Export", "export_plan"]

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "torch-pipelining": torch_pipelining.ENGINE,
        "torchtitan": torchtitan.ENGINE,
        "megatron": megatron.ENGINE,
        "deepspeed": deepspeed.ENGINE,
    }
)


def export_plan(plan: PlanRecord, name: str) -> Export:
    """Return the plan in the files of another engine.

    Raises:
        ValueError: no engine has this name, or the engine cannot run the plan. Lists every reason, and what to plan
            instead.
    """
    if name not in ENGINES:
        raise InputError(f"no engine is called {name!r}: export to one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    if faults := faults_of(plan, engine):
        raise InputError(f"{name} cannot run this plan:\n  " + "\n  ".join(faults))
    notes = notes_of(plan, engine)
    return Export(name, MappingProxyType(dict(engine.files(plan, notes))), notes)
