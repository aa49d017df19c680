"""Export for DeepSpeed: a PipelineModule subclass that is cut into the stages of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ..plans.plan_record import PlanRecord
from .conditions import micro_batches_of, names_of, recomputes
from .engine import Engine, commented, python_list

_CODE = '''

class PlannedPipelineModule(PipelineModule):
    """A PipelineModule that is cut at PARTS. It ignores partition_method."""

    def _partition_layers(self, method="planned"):
        stages, layers = self._topo.get_dim("pipe"), len(self._layer_specs)
        if (stages, layers) != (len(PARTS) - 1, len(LAYERS)):
            raise ValueError(
                f"the plan has {len(PARTS) - 1} stages of {len(LAYERS)} layers, not {stages} stages of {layers} layers"
            )
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


def _notes(plan: PlanRecord) -> Iterator[str]:
    count = micro_batches_of(plan)
    yield (
        "Use PlannedPipelineModule(layers, num_stages=len(PARTS) - 1, loss_fn=...) with one layer for each in LAYERS, "
        "in this order. partition_method cannot name a cut by hand"
    )
    yield f"Set gradient_accumulation_steps to {count} in the configuration: a step has {count} micro-batches"
    if plan.profile is not None and any(info.modules for info in plan.profile.layers):
        yield (
            "The profiled model is no nn.Sequential: what its forward does between these modules has to be done in the "
            "layers"
        )
    if recomputes(plan):
        most = max(len(stage.layers) for stage in plan.stages)
        yield f"All stages recompute: give activation_checkpoint_interval={most}"


def _files(plan: PlanRecord, notes: Sequence[str]) -> Mapping[str, str]:
    parts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    text = [
        commented("Stages of a plan of pipepart, for DeepSpeed.", notes),
        "from deepspeed.pipe import PipelineModule\n\n",
        python_list("LAYERS", names_of(plan)),
        f"PARTS = {parts}  # stage s has the layers PARTS[s] to PARTS[s + 1] - 1\n",
        _CODE,
    ]
    return {"deepspeed_module.py": "".join(text)}


ENGINE = Engine(
    _files,
    _notes,
    schedules=("1f1b",),
    far_values="A layer gets what the one before it returned, so that layers have to return what is used later",
)
