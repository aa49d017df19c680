"""Export for torch.distributed.pipelining: split points, the stages of each rank, and the schedule as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ..plans.plan import Plan
from ..plans.value_ways import value_ways
from .engine import Engine, head_of, micro_batches_of, modules_of, order_of, python_list

_CODE = '''

def build_stages(pipe, rank, device, group=None):
    """Return the stages of a rank of the pipeline; pipe is what torch's pipeline(...) returned."""
    return [STAGE for number in STAGES_OF_RANK[rank]]


def build_schedule(stages, loss_fn, **options):
    """Return the plan's schedule for the stages of this rank.

    Options are those of torch's multi-stage schedules, such as scale_grads.
    """
    schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss_fn, **options)
    schedule._load_csv(str(Path(__file__).with_name("schedule.csv")))
    return schedule
'''
_TRACED = "pipe.build_stage(number, device, group)"
_BY_HAND = "PipelineStage(pipe.get_stage_module(number), number, len(LAYERS), device, group=group)"


def _faults(plan: Plan) -> Iterator[str]:
    if _has_neighbours(plan) and (borders := _borders_with_several_values(plan)):
        yield (
            f"stage {', '.join(borders)} passes on several values, and where a rank has neighbouring stages torch is "
            "sure of one only: plan with schedule='1f1b' or 'interleaved-1f1b'"
        )
    modules = modules_of(plan)
    calls = Counter(module for called in modules.values() for module in called)
    for number, stage in enumerate(plan.stages[1:], 1):
        name = stage.layers[0]
        called = modules[name]
        if len(called) > 1 or any(calls[path] > 1 for path in called):
            times = ", ".join(f"{path!r}, which is called {calls[path]} times" for path in called)
            yield (
                f"stage {number} begins with layer {name!r}, and a split point is one module that is called once, not "
                f"{times}: plan with colocate=[[{plan.stages[number - 1].layers[-1]!r}, {name!r}]]"
            )


def _files(plan: Plan) -> Mapping[str, str]:
    order, modules, by_hand = order_of(plan), modules_of(plan), _has_neighbours(plan)
    title = (
        "Stages and schedule of a plan of pipepart, for torch.distributed.pipelining of torch 2.9 or later."
    )
    splits = "".join(
        f"    {modules[stage.layers[0]][0]!r}: SplitPoint.BEGINNING,\n" for stage in plan.stages[1:]
    )
    text = [
        head_of(plan, title),
        "from pathlib import Path\n\n"
        f"from torch.distributed.pipelining import {'PipelineStage, ' if by_hand else ''}SplitPoint\n"
        "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime\n\n",
        f"MICRO_BATCHES = {micro_batches_of(plan)}\n",
        python_list("LAYERS", (list(stage.layers) for stage in plan.stages)),
        python_list("STAGES_OF_RANK", (list(order.stages_of(rank)) for rank in range(order.devices))),
        f"SPLIT_POINTS = {{\n{splits}}}\n",
        _CODE.replace("STAGE ", f"{_BY_HAND if by_hand else _TRACED} "),
    ]
    return {"torch_stages.py": "".join(text), "schedule.csv": order.to_csv()}


def _has_neighbours(plan: Plan) -> bool:
    """Return True if a rank has two adjacent stages.

    Traced stages of torch then send to the same rank when they connect, which fails (torch 2.13,
    `_get_init_p2p_neighbors_ops`). A `PipelineStage` built by hand does not fail, but passes values on by position.
    """
    return any(rank == next_rank for rank, next_rank in pairwise(order_of(plan).device_of))


def _borders_with_several_values(plan: Plan) -> list[str]:
    """Return the stages that pass on several values: torch may pass them on in another order."""
    ways = value_ways(plan)
    outputs = {info.name: len(info.outputs) for info in plan.profile.layers} if plan.profile else {}
    return [
        str(border)
        for border, stage in enumerate(plan.stages[:-1])
        if (sum(way.crosses(border) for way in ways) or outputs.get(stage.layers[-1], 1)) > 1
    ]


ENGINE = Engine(_files, _faults, recomputes=False, takes_far_values=False)
