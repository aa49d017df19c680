"""From a profile and a cluster to a plan: the cut, the schedule, and what they are predicted to cost."""

from .changes import ModelChanged, model_changes, warn_of_changes
from .cut import Cut, CutDoesNotFit, cut
from .estimate import estimate
from .link_times import refine_cluster
from .misfit import DoesNotFit
from .plan import Alternative, Plan, Prediction
from .planner import check_devices, micro_batches_worth_trying, plan
from .remedies import Remedy
from .replan import refine, replan
from .stage_plan import StagePlan

__all__ = [
    "Alternative",
    "Cut",
    "CutDoesNotFit",
    "DoesNotFit",
    "ModelChanged",
    "Plan",
    "Prediction",
    "Remedy",
    "StagePlan",
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
