"""What runs layers of a stage together: compiled, recorded, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..planning import Plan
from .compiled import Compiled, CompileOptions, compile_options
from .cuda_graphs import CudaRecorder, check_cuda_graphs
from .graphs import Graphed
from .regions import InOrder, MakeTogether, Together
from .slots import GraphRecorder

MakeForDevice = Callable[[torch.device], MakeTogether | None]


def together(plan: Plan, compile: CompileOptions, cuda_graphs: bool) -> MakeForDevice:
    """What makes it for a stage on a device; None where layers run one by one.

    Raises:
        TypeError, ValueError, RuntimeError: the wishes are wrong, or the plan does not go with them.
    """
    options = compile_options(compile, plan)
    if cuda_graphs:
        check_cuda_graphs(plan)
    elif options is None:
        return lambda _: None
    return lambda device: partial(_make, options, CudaRecorder(device) if cuda_graphs else None)


def _make(
    options: Mapping[str, Any] | None, recorder: GraphRecorder | None, modules: Sequence[nn.Module]
) -> Together:
    run = InOrder(modules) if options is None else Compiled(modules, options)
    return run if recorder is None else Graphed(run, modules, recorder)
