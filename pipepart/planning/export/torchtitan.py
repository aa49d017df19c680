"""Export for torchtitan: the modules of each model part, and the schedule as CSV."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from schedules.core.placement import looped, wave

from ..plans.plan import Plan
from .engine import Engine, head_of, modules_of, order_of, python_list

_PATH = re.compile(r"[^.]+(\.[0-9]+)?")  # a child of the model, or an element of its ModuleList or ModuleDict

_CODE = '''

def apply(config):
    """Set the pipeline options of torchtitan's Trainer.Config; return it."""
    config.parallelism.pipeline_parallel_degree = {degree}
    config.parallelism.pipeline_parallel_schedule = {schedule!r}  # says which stages a rank has
    config.parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name("schedule.csv"))
    config.parallelism.module_fqns_per_model_part = MODULE_FQNS_PER_MODEL_PART
    return config
'''


def _faults(plan: Plan) -> Iterator[str]:
    if not _schedule_name(plan):
        yield (
            "its ranks have stages in rounds (0, 1, 0, 1) or in a V (0, 1, 1, 0), not "
            f"{', '.join(map(str, order_of(plan).device_of))}: plan with schedule='1f1b', 'interleaved-1f1b' or 'zb-v'"
        )
    if plan.profile is not None and not any(info.modules for info in plan.profile.layers):
        yield (
            "the profile is of an nn.Sequential, and torchtitan calls the forward of a model whose other children are "
            "None: profile the torchtitan model itself"
        )
        return
    parts = _parts(plan)
    if deep := [path for part in parts for path in part if not _PATH.fullmatch(path)]:
        yield (
            f"it keeps or drops children of the model and elements of its lists, which {deep[0]!r} is not (nor are "
            f"{len(deep) - 1} other modules of the plan): profile a torchtitan model, with layers=[...] that are such"
        )
    for path, count in Counter(path for part in parts for path in part).items():
        if count > 1:
            yield f"module {path!r} is called in {count} stages: colocate its layers"


def _files(plan: Plan) -> Mapping[str, str]:
    order = order_of(plan)
    text = [
        head_of(plan, "Pipeline options of a plan of pipepart, for torchtitan."),
        "from pathlib import Path\n\n",
        python_list("MODULE_FQNS_PER_MODEL_PART", _parts(plan)),
        _CODE.format(degree=order.devices, schedule=_schedule_name(plan)),
    ]
    return {"torchtitan_parallelism.py": "".join(text), "schedule.csv": order.to_csv()}


def _schedule_name(plan: Plan) -> str:
    """Return the name of a torch schedule with the same stages on each rank as the plan; empty if there is none."""
    order = order_of(plan)
    chunks, rest = divmod(order.stages, order.devices)
    if not rest and order.device_of == looped(order.devices, chunks):
        return "1F1B" if chunks == 1 else "Interleaved1F1B"
    return "ZBVZeroBubble" if order.device_of == wave(order.devices, 2) else ""


def _parts(plan: Plan) -> list[list[str]]:
    """Return [stages]: the module paths of the stage in the order of their calls, without duplicates."""
    modules = modules_of(plan)
    return [
        list(dict.fromkeys(path for name in stage.layers for path in modules[name])) for stage in plan.stages
    ]


ENGINE = Engine(_files, _faults)
