"""pipepart: measures a PyTorch model, cuts it into stages, and trains them as a pipeline over several devices.

Names are imported at their first use, so that ``pipepart --help`` does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import capture, planning, profiling
    from .capture import CaptureError, LayerGraph
    from .capture.deferred import deferred_init
    from .checkpoint import CheckpointError, load, save
    from .cluster import Cluster, Device, Link
    from .data.arguments import Arguments
    from .data.split import Whole
    from .loss import LossError, add_loss, collect_losses
    from .measure import profile
    from .pipeline import Pipeline
    from .planning import InfeasiblePlanError, Plan, plan, replan
    from .profiling import Profile, Roofline
    from .ranks.failure import RankError
    from .runtime.observe.trace import Trace
    from .verify import CheckReport, check

_HOMES = {
    "Arguments": "data.arguments",
    "CaptureError": "capture",
    "CheckReport": "verify",
    "CheckpointError": "checkpoint",
    "Cluster": "cluster",
    "Device": "cluster",
    "InfeasiblePlanError": "planning",
    "LayerGraph": "capture",
    "Link": "cluster",
    "LossError": "loss",
    "Pipeline": "pipeline",
    "Plan": "planning",
    "Profile": "profiling",
    "RankError": "ranks.failure",
    "Roofline": "profiling",
    "Trace": "runtime.observe.trace",
    "Whole": "data.split",
    "add_loss": "loss",
    "check": "verify",
    "collect_losses": "loss",
    "deferred_init": "capture.deferred",
    "load": "checkpoint",
    "plan": "planning",
    "profile": "measure",
    "replan": "planning",
    "save": "checkpoint",
}
_ROOMS = ("capture", "planning", "profiling")

__all__ = [
    "Arguments",
    "CaptureError",
    "CheckReport",
    "CheckpointError",
    "Cluster",
    "Device",
    "InfeasiblePlanError",
    "LayerGraph",
    "Link",
    "LossError",
    "Pipeline",
    "Plan",
    "Profile",
    "RankError",
    "Roofline",
    "Trace",
    "Whole",
    "add_loss",
    "capture",
    "check",
    "collect_losses",
    "deferred_init",
    "load",
    "plan",
    "planning",
    "profile",
    "profiling",
    "replan",
    "save",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("pipepart")
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
