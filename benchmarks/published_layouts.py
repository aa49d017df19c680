"""`python -m benchmarks.published_layouts`: predicted steps of published runs with tensor and pipeline parallelism.

The runs are those of Table 1 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC21, arXiv:2104.04473), with tensor parallelism 8, pipelines, and replicas. The table has teraFLOP/s per
GPU; the seconds of a step follow from formula (3) of the paper, in which activations are recomputed. The paper does not
say the micro-batches: here they have one sequence.

Nothing is measured: layers are profiled on the meta device under one roofline for all runs. So the ratios of different
runs to each other say how true the plans are; their mean says how well the roofline was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Plan
from pipepart.profiling import Roofline

_SEQUENCE, _VOCABULARY = 2048, 51_200
_ROOFLINE = "cuda: 220 TFLOP/s, 1.3 TB/s, 5 us"  # of an A100: 70 % of its peak, 65 % of its bandwidth
_LINK = "250GB/s"  # NVLink in one direction


class Run(NamedTuple):
    """One row of the table.

    Attributes:
        billions: of parameters.
        batch: sequences of a step.
        teraflops: reached per second and GPU.
    """

    billions: float
    heads: int
    width: int
    blocks: int
    tensor: int
    stages: int
    gpus: int
    batch: int
    teraflops: float

    @property
    def micro_batches(self) -> int:
        """Sequences of one replica."""
        return self.batch * self.tensor * self.stages // self.gpus

    @property
    def step_seconds(self) -> float:
        """As published."""
        rest = 1 + _SEQUENCE / (6 * self.width) + _VOCABULARY / (16 * self.blocks * self.width)
        flops = 96 * self.batch * _SEQUENCE * self.blocks * self.width**2 * rest
        return flops / (self.teraflops * 1e12 * self.gpus)


RUNS = (
    Run(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    Run(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Run(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Run(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
)


class Block(nn.Module):
    """A block of GPT with separate queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).view(samples, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def parallelize(layers: Mapping[str, nn.Module], mesh: Any) -> None:
    """Tensor parallelism as Megatron-LM's, but that the logits are gathered for the loss."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in layers.values():
        if isinstance(layer, Block):
            columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
            rows = {name: RowwiseParallel() for name in ("out", "down")}
            parallelize_module(layer, mesh["tp"], {**columns, **rows})
        elif isinstance(layer, nn.Embedding):
            parallelize_module(layer, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        elif isinstance(layer, nn.Linear):
            parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def plans(run: Run) -> list[Plan]:
    """Return the plans of one replica under 1F1B, and under interleaved 1F1B with two stages a device."""
    with torch.device("meta"):
        blocks = [Block(run.width, run.heads) for _ in range(run.blocks)]
        embedding, head = nn.Embedding(_VOCABULARY, run.width), nn.Linear(run.width, _VOCABULARY, bias=False)
        model = nn.Sequential(embedding, *blocks, nn.LayerNorm(run.width), head).bfloat16()
        words = torch.zeros(run.micro_batches, _SEQUENCE, dtype=torch.long)
    profile = pipepart.profile(
        model,
        words,
        loss_fn=_loss,
        target=words,
        micro_batches=run.micro_batches,
        measure=False,
        roofline=Roofline.parse(_ROOFLINE),
        parallelize=parallelize,
        tensor=run.tensor,
    )
    cluster = Cluster.parse(["80GiB"] * (run.tensor * run.stages), link=_LINK)
    schedules: list[dict[str, Any]] = [
        {"schedule": "1f1b", "stages": run.stages},
        {"schedule": "interleaved-1f1b", "chunks": 2},
    ]
    return [
        pipepart.plan(
            profile,
            cluster,
            micro_batches=run.micro_batches,
            tensor=run.tensor,
            recompute="always",
            **schedule,
        )
        for schedule in schedules
    ]


def main(quick: Annotated[bool, typer.Option("--quick", help="The smallest run only.")] = False) -> None:
    """Print the published seconds of a step beside those that plans of the same layout predict."""
    table = Table("parameters", "tensor", "stages", "m", "published", "1f1b", "interleaved")
    for run in RUNS[: 1 if quick else None]:
        predicted = [plan.predicted.step_seconds for plan in plans(run)]
        table.add_row(
            f"{run.billions:g} B",
            *(str(number) for number in (run.tensor, run.stages, run.micro_batches)),
            f"{run.step_seconds:.1f} s",
            *(f"{seconds:.1f} s ({seconds / run.step_seconds:.2f})" for seconds in predicted),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
