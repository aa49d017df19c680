"""How a pipeline runs its plan: the keywords that :class:`pipepart.Pipeline` and ``Pipeline.auto`` both take."""

from __future__ import annotations

from typing import Literal, TypedDict

from ..data.split import Merger
from .compiled import CompileOptions
from .state.optimizers import OptimizerFactory


class RunOptions(TypedDict, total=False):
    """:class:`pipepart.Pipeline` says what each means."""

    reduction: Literal["mean", "sum"] | None
    merge: Merger | None
    deferred_batch_norm: bool
    trace: bool
    strict: bool
    optimizer: OptimizerFactory | None
    compile: CompileOptions
    timeout: float | None
    nan_guard: bool
