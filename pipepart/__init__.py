"""pipepart: measures a PyTorch model, cuts it into stages, and trains them as a pipeline over several devices."""

from . import capture, planning, profiling
from .capture import LayerGraph
from .cluster import Cluster, Device, Link
from .data.arguments import Arguments
from .data.split import Whole
from .loss import add_loss, collect_losses
from .pipeline import Pipeline
from .planning import DoesNotFit, Plan, plan, replan
from .profiling import Profile, profile
from .runtime.observe.trace import Trace
from .verify import CheckReport, check

__all__ = [
    "Arguments",
    "CheckReport",
    "Cluster",
    "Device",
    "DoesNotFit",
    "LayerGraph",
    "Link",
    "Pipeline",
    "Plan",
    "Profile",
    "Trace",
    "Whole",
    "add_loss",
    "capture",
    "check",
    "collect_losses",
    "plan",
    "planning",
    "profile",
    "profiling",
    "replan",
]
