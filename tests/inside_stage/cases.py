"""Models, functions that parallelize their layers, and trainings, which the tests run on four ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import pipepart
from pipepart import Pipeline, Plan
from pipepart.capture import flatten
from pipepart.dtensors import whole
from tests.distributed.training import TIMEOUT, drawn_batches
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.ranks import assert_same_bits

W = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.up, self.down = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sometimes(nn.Module):
    """Uses one of two parts, by the values of the input; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low, self.never = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(x) if x.sum() > 0 else self.low(x)


class Towers(nn.Module):
    """Not a Sequential: blocks in a loop, with a parameter beside them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(W, W)
        self.shift = nn.Parameter(torch.randn(W))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(W, W)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh()


def blocks() -> nn.Sequential:
    """Eight layers, of which the last four are in a Sequential; the stages of a cut in two end in a block."""
    torch.manual_seed(0)
    first, second = ([nn.Linear(W, W), Block(), nn.Dropout(0.0), Block()] for _ in range(2))
    return nn.Sequential(*first, nn.Sequential(*second)).double()


def sometimes() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Sometimes(), nn.Tanh(), Sometimes(), Sometimes()).double()


def shard(layers: Mapping[str, nn.Module], mesh: DeviceMesh, **how: Any) -> None:
    """FSDP2 for all but Linears, with a unit inside each unit; parts of a Block stay in its own."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        if isinstance(layer, Block | Sometimes):
            fully_shard(
                next(part for part in layer.children() if isinstance(part, nn.Linear)), mesh=mesh["dp"], **how
            )
            fully_shard(layer, mesh=mesh["dp"], **how)


def split(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in layers.values():
        if isinstance(layer, Block):
            how = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], how)  # type: ignore[arg-type]


def split_and_shard(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    split(layers, mesh)
    shard(layers, mesh)


def shard_in_bfloat16(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Compute in bfloat16, add gradients up in float64."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float64, torch.float64)
    for layer in layers.values():
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)


reshard = partial(shard, reshard_after_forward=True)


class Layout(NamedTuple):
    """How four processes share a model out."""

    parallelize: Callable[[Mapping[str, nn.Module], DeviceMesh], None] | None = None
    replicas: int = 1
    tensor: int = 1
    borders: Sequence[int] = (4,)
    schedule: str = "1f1b"
    micro_batches: int = 4
    chunks: int = 1
    recompute: Any = "never"
    offload: Any = "never"

    def plan(self, model: nn.Module) -> Plan:
        names = [name for name, _ in flatten(model)]
        how = self._asdict()
        return plan_by_hand(
            names, how.pop("borders"), **{key: how[key] for key in how if key != "parallelize"}
        )


def pipeline(model: nn.Module, layout: Layout, plan: Plan | None = None, **options: Any) -> Pipeline:
    plan = plan or layout.plan(model)
    return Pipeline(model, plan, nn.MSELoss(), parallelize=layout.parallelize, timeout=TIMEOUT, **options)


def automatic(model: nn.Module, layout: Layout, plan: None = None) -> Pipeline:
    """``Pipeline.auto`` with the schedule, the micro-batches and the sizes of a layout."""
    sample, target = batches((8,))[0]
    return Pipeline.auto(
        model,
        sample,
        target=target,
        loss_fn=nn.MSELoss(),
        schedule=layout.schedule,
        micro_batches=layout.micro_batches,
        replicas=layout.replicas,
        tensor=layout.tensor,
        shard=layout.replicas > 1,
        parallelize=layout.parallelize,
        timeout=TIMEOUT,
    )


def gradients(pipe: Pipeline) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in pipe.named_parameters()}


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return drawn_batches(sizes, width=W)


def differentiated(model: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor | None]:
    """The output of a call, and the gradient of its input; those of the parameters are added to."""
    output = model(x.requires_grad_())
    output.sin().sum().backward()
    return {"output": output.detach(), "input": x.grad}


def trained(
    make: Callable[[], nn.Module],
    layout: Layout,
    sizes: Sequence[int] = (8, 8),
    plan: Plan | None = None,
    max_norm: float = 0.1,
    make_pipeline: Callable[..., Pipeline] = pipeline,
) -> dict[str, Any]:
    """Train on one mini-batch of each size; return all that other layouts give, too."""
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "evaluated": []}
    with make_pipeline(make(), layout, plan) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for x, y in batches(sizes):
            optimizer.zero_grad()
            found["losses"].append(pipe.step(x, target=y))
            found["gradients"].append(gradients(pipe))
            found["norms"].append(pipe.clip_grad_norm_(max_norm))
            optimizer.step()
            found["evaluated"].append(pipe.evaluate(x, target=y))
        found |= differentiated(pipe, batches(sizes)[-1][0])
        found["state"] = pipe.full_state_dict()
        found["sharded"] = sorted(name for name, p in pipe.named_parameters() if whole(p) is not p)
    return found


def resumed(layout: Layout, load: Path | None, save: Path | None) -> dict[str, Any]:
    with pipeline(blocks(), layout) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, amsgrad=True)
        if load:
            pipepart.load(load, pipe, optimizer)
        losses = []
        for x, y in batches((8, 8)):
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=y))
            optimizer.step()
        if save:
            pipepart.save(save, pipe, optimizer, step=2)
        return {"losses": losses, "state": pipe.full_state_dict()}


def reloaded(layout: Layout) -> dict[str, Any]:
    with pipeline(blocks(), layout) as pipe:
        plus = {name: value + 1 for name, value in pipe.full_state_dict().items()}
        pipe.load_state_dict(plus)
        own = {name: value * 2 for name, value in pipe.state_dict().items()}
        found = {"plus": pipe.full_state_dict()}
        pipe.load_state_dict(plus | own)
        return {**found, "twice": pipe.full_state_dict()}


_STEPPED = 1e-10  # of values after optimizer steps: AdamW divides small gradients by their size


def assert_near_plain(
    found: Sequence[dict[str, Any]], make: Callable[[], nn.Module] = blocks, plan: Plan | None = None
) -> None:
    """Near the numbers of one process in float64, and equal on all ranks; ``plan`` of a recorded model."""
    wanted = trained(make, Layout(borders=(), micro_batches=1), plan=plan)
    for one in found:
        for key in ("losses", "norms", "evaluated", "output", "input", "state"):
            assert_same_bits(one[key], found[0][key], key)
        own, everything = one["gradients"][0], wanted["gradients"][0]
        plain.assert_close(own, {name: everything[name] for name in own})
        plain.assert_near(one["losses"][0], wanted["losses"][0])
        plain.assert_near(one["norms"][0], wanted["norms"][0])
        for key in ("losses", "norms", "evaluated"):
            plain.assert_near(torch.stack(one[key]), torch.stack(wanted[key]), _STEPPED, key)
        for key in ("output", "input"):
            plain.assert_near(one[key], wanted[key], _STEPPED, key)
        plain.assert_close(one["state"], dict(wanted["state"]), _STEPPED)
