"""From a profile and a cluster to a plan: the cut, the schedule, and what they are predicted to cost."""

from .cut import Cut, CutDoesNotFit, cut
from .plan import Plan, Prediction, StagePlan
from .planner import DoesNotFit, micro_batches_worth_trying, plan

__all__ = [
    "Cut",
    "CutDoesNotFit",
    "DoesNotFit",
    "Plan",
    "Prediction",
    "StagePlan",
    "cut",
    "micro_batches_worth_trying",
    "plan",
]
