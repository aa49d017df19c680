"""Planning: finds the cut, placement and schedule of a pipeline with the shortest predicted step.

The graph cutter (``cut``, ``Cut``, ``CutDoesNotFit``) is imported at its first use, as it needs scipy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .costs.interpolate import estimate
from .feedback import refine, replan
from .model_changes import ModelChanged, model_changes, warn_of_changes
from .planner import micro_batches_worth_trying, plan
from .plans.export import Export
from .plans.options import PlanOptions
from .plans.plan import Plan
from .plans.prediction import Alternative, Prediction
from .plans.stage_plan import StagePlan
from .plans.value_ways import ValueWay, value_ways
from .request import check_options
from .suggestions import InfeasiblePlanError, Suggestion

if TYPE_CHECKING:
    from ..graph_partition.partition import Cut, CutDoesNotFit, cut

__all__ = [
    "Alternative",
    "Cut",
    "CutDoesNotFit",
    "Export",
    "InfeasiblePlanError",
    "ModelChanged",
    "Plan",
    "PlanOptions",
    "Prediction",
    "StagePlan",
    "Suggestion",
    "ValueWay",
    "check_options",
    "cut",
    "estimate",
    "micro_batches_worth_trying",
    "model_changes",
    "plan",
    "refine",
    "replan",
    "value_ways",
    "warn_of_changes",
]


def __getattr__(name: str) -> Any:
    if name in ("Cut", "CutDoesNotFit", "cut"):
        return getattr(import_module("pipepart.graph_partition.partition"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
