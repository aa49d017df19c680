"""The keywords that :class:`pipepart.Pipeline` and ``Pipeline.auto`` share, and checks of all arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal, TypedDict

from .capture import Verify
from .data.gather import Merger
from .input_error import InputError, InputTypeError
from .planning import Plan
from .profiling import Parallelize
from .runtime.compiled import CompileOptions
from .runtime.placing import Initialize
from .runtime.sinks import check_forwards_first
from .runtime.state.optimizers import OptimizerFactory, check_optimizer


class RunOptions(TypedDict, total=False):
    """Keywords of a pipeline; documented at :class:`pipepart.Pipeline`."""

    reduction: Literal["mean", "sum", "batch"] | None
    merge: Merger | None
    trace: bool
    strict: bool
    optimizer: OptimizerFactory | None
    compile: CompileOptions
    timeout: float | None
    verify: Verify
    weights: str | PathLike[str] | None
    initialize: Initialize | None
    parallelize: Parallelize | None


def check_keywords(options: Mapping[str, Any], others: Iterable[str]) -> None:
    """Check the keywords of ``Pipeline.auto`` before anything is measured.

    Args:
        options: the keywords for the pipeline.
        others: the names of the other parameters of ``Pipeline.auto``.

    Raises:
        TypeError: a keyword is unknown, or an argument has the wrong type.
        ValueError: ``timeout`` is not a positive, finite number.
    """
    for name in options.keys() - RunOptions.__annotations__.keys():
        near = get_close_matches(name, [*others, *RunOptions.__annotations__], n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputTypeError(f"Pipeline.auto() got an unexpected keyword argument {name!r}{hint}")
    check_functions(merge=options.get("merge"))
    check_optimizer(options.get("optimizer"))
    check_timeout(options.get("timeout"))


def check_functions(**functions: Any) -> None:
    """Check that functions are callable or None.

    Raises:
        TypeError: a function is not callable.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InputTypeError(f"{name} must be a function, got {function!r:.80}")


def check_runs(
    plan: Plan, reduction: str | None, optimizer: OptimizerFactory | None, timeout: float | None
) -> None:
    """Refuse what a pipeline cannot run, before anything is moved to a device.

    Raises:
        TypeError: ``plan`` is not a Plan, or ``optimizer`` cannot be called.
        ValueError: the plan does not allow the optimizers or the reduction; or ``timeout`` is not a
            positive, finite number.
    """
    if not isinstance(plan, Plan):
        hint = f": load it, pipepart.Plan.load({str(plan)!r})" if isinstance(plan, str | PathLike) else ""
        raise InputTypeError(f"plan must be a pipepart.Plan, got a {type(plan).__name__}{hint}")
    check_optimizer(optimizer, plan)
    check_timeout(timeout)
    if reduction == "batch":
        check_forwards_first(plan.build_schedule())


def check_timeout(timeout: float | None) -> None:
    """Check that a timeout is None or positive.

    Raises:
        ValueError: ``timeout`` is not positive.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
        raise InputError(
            f"timeout must be a number of seconds above 0, or None to wait for ever; got {timeout!r}"
        )
