"""Export for DeepSpeed: a PipelineModule subclass that is cut into the stages of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ..plans.plan import Plan
from .engine import Engine, commented, micro_batches_of, modules_of, python_list

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


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        "Use PlannedPipelineModule(layers, num_stages=len(PARTS) - 1, loss_fn=...) with one layer for each in LAYERS, "
        "in this order. A layer gets what the one before it returned"
    )
    yield f"Set gradient_accumulation_steps to {micro_batches_of(plan)} in the configuration"
    if any(stage.recompute != "never" for stage in plan.stages):
        most = max(len(stage.layers) for stage in plan.stages)
        yield f"All stages recompute: give activation_checkpoint_interval={most}"


def _files(plan: Plan, notes: Sequence[str]) -> Mapping[str, str]:
    parts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    text = [
        commented("Stages of a plan of pipepart, for DeepSpeed.", notes),
        "from deepspeed.pipe import PipelineModule\n\n",
        python_list("LAYERS", modules_of(plan)),
        f"PARTS = {parts}  # stage s has the layers PARTS[s] to PARTS[s + 1] - 1\n",
        _CODE,
    ]
    return {"deepspeed_module.py": "".join(text)}


ENGINE = Engine(_files, _notes, schedules=("1f1b",))
