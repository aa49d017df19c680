"""Export for DeepSpeed: a PipelineModule subclass that is cut into the stages of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from ..plans.plan import Plan
from .engine import Engine, head_of, micro_batches_of, modules_of, python_list

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


def _files(plan: Plan) -> Mapping[str, str]:
    parts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    most = max(len(stage.layers) for stage in plan.stages) if plan.stages[0].recompute != "never" else 0
    text = [
        head_of(plan, "Stages of a plan of pipepart, for DeepSpeed."),
        "from deepspeed.pipe import PipelineModule\n\n",
        python_list("LAYERS", modules_of(plan)),
        f"PARTS = {parts}  # stage s has the layers PARTS[s] to PARTS[s + 1] - 1\n",
        f"CONFIG = {{'gradient_accumulation_steps': {micro_batches_of(plan)}}}\n",
        f"ACTIVATION_CHECKPOINT_INTERVAL = {most}  # 0: no stage recomputes\n",
        _CODE,
    ]
    return {"deepspeed_module.py": "".join(text)}


ENGINE = Engine(_files, schedules=("1f1b",))
