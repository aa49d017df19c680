"""Exports a plan to the pipeline configuration of other engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...input_error import InputError
from ..plans.export import Export
from ..plans.plan import Plan
from . import torch_pipelining, torchtitan
from .engine import Engine

__all__ = ["ENGINES", "export_plan"]

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "torch-pipelining": torch_pipelining.ENGINE,
        "torchtitan": torchtitan.ENGINE,
    }
)


def export_plan(plan: Plan, name: str) -> Export:
    """Return the plan in the files of another engine, as :meth:`pipepart.planning.Plan.export` does."""
    if name not in ENGINES:
        raise InputError(f"no engine is called {name!r}: export to one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    if faults := engine.faults_of(plan):
        raise InputError(f"{name} cannot run this plan:\n  " + "\n  ".join(faults))
    return Export(name, MappingProxyType(dict(engine.files(plan))))
