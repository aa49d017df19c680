"""From a profile and a cluster to a plan: the cut, the schedule, and what they are predicted to cost."""

from .costs.interpolate import estimate
from .feasibility.infeasible import InfeasiblePlanError
from .feasibility.suggestions import Suggestion
from .feedback.link_times import refine_cluster
from .feedback.model_changes import ModelChanged, model_changes, warn_of_changes
from .feedback.refine import refine, replan
from .graph import Cut, CutDoesNotFit, cut
from .plan_document import Alternative, Plan, Prediction
from .planner import check_choices, check_devices, micro_batches_worth_trying, plan
from .stage_plan import StagePlan

__all__ = [
    "Alternative",
    "Cut",
    "CutDoesNotFit",
    "InfeasiblePlanError",
    "ModelChanged",
    "Plan",
    "Prediction",
    "StagePlan",
    "Suggestion",
    "check_choices",
    "check_devices",
    "cut",
    "estimate",
    "micro_batches_worth_trying",
    "model_changes",
    "plan",
    "refine",
    "refine_cluster",
    "replan",
    "warn_of_changes",
]
