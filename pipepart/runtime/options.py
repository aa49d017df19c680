"""How a pipeline runs its plan: the keywords that every way of making a pipeline takes."""

from __future__ import annotations

from typing import Literal, TypedDict

from . import CompileOptions


class RunOptions(TypedDict, total=False):
    """Those of :class:`pipepart.Pipeline`, which says what each means."""

    reduction: Literal["mean", "sum"] | None
    deferred_batch_norm: bool
    trace: bool
    strict: bool
    compile: CompileOptions
    timeout: float | None
    nan_guard: bool
