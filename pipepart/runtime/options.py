"""RunOptions: the keywords that :class:`pipepart.Pipeline` and ``Pipeline.auto`` share."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, TypedDict

from ..data.split import Merger
from ..planning import Plan
from .compiled import CompileOptions
from .failure.stalled import check_timeout
from .loss_sink import check_forwards_first
from .state.optimizers import OptimizerFactory, check_optimizer


class RunOptions(TypedDict, total=False):
    """Keywords of a pipeline; documented at :class:`pipepart.Pipeline`."""

    reduction: Literal["mean", "sum", "batch"] | None
    merge: Merger | None
    deferred_batch_norm: bool
    trace: bool
    strict: bool
    optimizer: OptimizerFactory | None
    compile: CompileOptions
    timeout: float | None
    nan_guard: bool


def check_types(plan: Any, **functions: Any) -> None:
    """Check that ``plan`` is a Plan (unless it is still to be made) and that functions are callable.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if plan is not None and not isinstance(plan, Plan):
        hint = f": load it, pipepart.Plan.load({str(plan)!r})" if isinstance(plan, str | PathLike) else ""
        raise TypeError(f"plan must be a pipepart.Plan, got a {type(plan).__name__}{hint}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {function!r:.80}")


def check_runs(
    plan: Plan, reduction: str | None, optimizer: OptimizerFactory | None, timeout: float | None
) -> None:
    """Refuses what a pipeline cannot run, before anything is moved to a device.

    Raises:
        TypeError: ``optimizer`` cannot be called.
        ValueError: the plan has branches, or does not go with the optimizers or the reduction; or ``timeout`` is no
            positive, finite number.
    """
    if plan.edges:
        raise ValueError(
            f"the plan is for a model with branches ({len(plan.edges)} edges between layers), and a Pipeline runs "
            "chains of layers only so far; the plan can be printed, saved and simulated"
        )
    check_optimizer(optimizer, plan)
    check_timeout(timeout)
    if reduction == "batch":
        check_forwards_first(plan.build_schedule())
