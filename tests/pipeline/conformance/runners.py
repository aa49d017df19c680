"""Configurations to train a scenario, with a small set that covers nearly all pairs of settings."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipepart import Pipeline, Plan
from pipepart.capture import Chain, flatten
from schedules import Kind, build, split_backward
from tests.pipeline.conformance.scenarios import SCENARIOS, Scenario
from tests.support.chains import apart, on_devices, plan_by_hand
from tests.support.recorded import chain_for
from tests.support.searched import MODES, drawn_plan

# Schedules that a pipeline runs with the caller's optimizer, and their numbers of stages a device.
SCHEDULES: list[tuple[str, int]] = [
    *((name, 1) for name in ("sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "chimera")),
    *((name, 1) for name in ("interleaved-1f1b",)),
    *((name, 2) for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "hanayo")),
    *((name, 2) for name in ("zb-v", "v-half", "v-min", "dualpipe-v")),
    *((name, 3) for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")),
    ("hanayo", 4),
]
DRAWN = ("drawn", 0)  # an order of its own, of stages that lie anywhere
SPLITTING = {"zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v"}
WHOLE_BACKWARDS = {"gpipe", "1f1b", "eager-1f1b"}

# Simulated asynchronous devices: the device of each worker by its number.
LATE: dict[str, Callable[[int], str]] = {
    "late": lambda worker: f"vdev:{worker}",
    "late on one": lambda worker: "vdev:0",
    "late on two": lambda worker: f"vdev:{worker % 2}",
    "late and the CPU": lambda worker: "cpu" if worker % 2 else f"vdev:{worker}",
}
CUDA: dict[str, Callable[[int], str]] = {
    "cuda": lambda worker: "cuda:0",
    "cuda on two": lambda worker: f"cuda:{worker % 2}",
}
# Of torch, both with the kernels of the plain model.
BACKENDS = {"compiled": "eager", "compiled backward": "aot_eager"}

# Each with whether it is a mean over samples.
LOSSES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "mean": (nn.MSELoss(), True),
    "sum": (nn.MSELoss(reduction="sum"), False),
    "huber": (nn.functional.huber_loss, True),
    "own mean": (lambda output, target: (output - target).abs().mean(), True),
    "own sum": (lambda output, target: (output - target).pow(4).sum(), False),
}


@dataclass(frozen=True)
class Mode:
    """One training: what is trained, and how."""

    scenario: str
    schedule: tuple[str, int]
    devices: int  # of one replica
    border: int  # a stage begins at this layer; where the others begin is drawn
    stash: str  # what each stage does with it: a mode of ``MODES``, or "mixed"
    replicas: int
    sizes: tuple[int, int]  # samples of the mini-batch, and micro-batches
    dtype: torch.dtype
    loss: str
    runner: str
    home: str  # the devices: "threads", "apart", "strict", or of torch, one of ``LATE`` or ``CUDA``

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)).replace("torch.", "")

    @property
    def what(self) -> Scenario:
        return SCENARIOS[self.scenario]

    @property
    def stages(self) -> int:
        return self.devices * self.schedule[1]

    @property
    def parts(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return min(self.sizes[1], self.sizes[0])

    @property
    def device_of(self) -> Callable[[int], str] | None:
        """The torch device of each worker by its number; None for virtual devices."""
        return {**LATE, **CUDA}.get(self.home)

    @property
    def possible(self) -> bool:
        """Whether it is no training that is refused, and one that has an oracle."""
        what, (name, _) = self.what, self.schedule
        samples, micro_batches = self.sizes
        if what.alone and (self.replicas > 1 or name == "chimera"):
            return False
        if name == "chimera" and (self.devices != 2 or self.replicas == 3 or what.writes):
            return False
        if self.replicas > 1 and (what.writes or micro_batches < self.replicas or samples < micro_batches):
            return False
        if what.writes and samples < 2 * micro_batches:
            return False  # a batch norm wants two samples a micro-batch
        if what.sparse and self.dtype == torch.bfloat16:
            return False  # torch adds none up
        if what.by_address and self.dtype == torch.float32:
            return False
        if self.schedule == DRAWN:
            return self.replicas == 1 and self._runs and self.runner != "critical" and self.home != "apart"
        return (
            self._runs
            and self.stages <= min(7, what.layers)
            and self.stages * self.replicas <= 8  # beyond what shows more
        )

    @property
    def _runs(self) -> bool:
        alone = self.replicas == 1 and self.schedule[0] != "chimera"
        if self.home == "strict" and self.what.on_host:
            return False
        # A copy of a weight lies at another address, and float32 kernels of small matrices round by that.
        if (self.home == "apart" or self.device_of) and self.dtype != torch.float64:
            return False
        if self.home == "apart" and not (self.what.shared and alone):
            return False
        # There the worker behind may be the last to hold a tensor that is offloaded: an order that races do not see.
        if self.home in ("late on one", "late on two") and (
            self.stash in ("offload", "mixed") or self.schedule == DRAWN
        ):
            return False
        if self.runner == "critical":
            return self.schedule[0] in WHOLE_BACKWARDS and self.replicas == 1 and self.stages > 1
        if self.runner == "called":
            return alone
        return self.runner not in BACKENDS or self.home == "threads"

    def pipeline(self, model: nn.Module, compress: Any = None, **options: Any) -> Pipeline:
        """Return the pipeline of a model that the scenario has made; ``options`` are those of Pipeline."""
        what = self.what
        chain: nn.Module | Chain = model
        if not isinstance(model, nn.Sequential):
            sample = as_dtype(what.batch(self.sizes[0])[0], self.dtype)
            chain = chain_for(model, sample, loss_fn=what.loss, parts=self.parts)
        names = [name for name, _ in (flatten(model) if chain is model else chain.layers)]  # type: ignore[union-attr]
        assert what.recorded in (0, len(names))
        plan = self._plan(names, compress)
        if self.runner == "critical":
            plan = split_on_the_critical_path(plan)
        if self.home == "apart":
            plan = apart(plan)
        if self.device_of:
            plan = on_devices(plan, list(map(self.device_of, range(len(plan.cluster)))))
        if self.runner == "observed":
            options |= {"trace": True}
        if self.runner == "optimizers of stages":
            options["optimizer"] = sgd
        if self.runner in BACKENDS:
            torch.compiler.reset()
            options["compile"] = {"backend": BACKENDS[self.runner]}
        loss_fn = what.loss or LOSSES[self.loss][0]
        return Pipeline(chain, plan, loss_fn, strict=self.home == "strict", **options)  # type: ignore[arg-type]

    def _plan(self, names: Sequence[str], compress: Any) -> Plan:
        choose = random.Random(str(self))
        if self.schedule == DRAWN:
            return drawn_plan(choose, names, micro_batches=self.sizes[1])
        border = 1 + self.border % (len(names) - 1)
        others = [layer for layer in range(1, len(names)) if layer != border]
        borders = sorted([border, *choose.sample(others, self.stages - 2)]) if self.stages > 1 else []
        modes = [self.stash if self.stash in MODES else choose.choice(MODES) for _ in range(self.stages)]
        return plan_by_hand(
            names,
            borders,
            micro_batches=self.sizes[1],
            schedule=self.schedule[0],
            chunks=self.schedule[1],
            recompute=tuple("never" if mode == "offload" else mode for mode in modes),  # type: ignore[arg-type]
            offload=tuple("stash" if mode == "offload" else "never" for mode in modes),  # type: ignore[arg-type]
            replicas=self.replicas,
            compress=compress,
        )


def split_on_the_critical_path(plan: Plan) -> Plan:
    """Return the plan with most backwards of its later stages split, as a searched order of actions."""
    order = build(plan.schedule, len(plan.workers), plan.micro_batches, plan.chunks)
    actions = [action for row in order.actions for action in row]
    split = [one for one in actions if one.kind is Kind.B and one.stage > 0 and one.micro_batch != 1]
    rows = tuple(tuple(map(str, row)) for row in split_backward(order, split).actions)
    return plan.model_copy(update={"schedule": "search", "chunks": 1, "actions": rows})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def asking(x: Any) -> Any:
    """Return a copy of an input whose floating-point tensors ask for gradients; layouts stay."""

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().requires_grad_() if 0 in tensor.stride() else tensor.clone().requires_grad_()

    return pytree.tree_map_only(Tensor, copy, x)


def as_dtype(nest: Any, dtype: torch.dtype) -> Any:
    """Return a nest with its floating-point tensors in this type; layouts stay."""

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, converted, nest)


VALUES: dict[str, list[Any]] = {
    "scenario": list(SCENARIOS),
    "schedule": [*SCHEDULES, *[DRAWN] * 3],
    "devices": [1, 2, 3],
    "border": [0, 1, 2, 3, 4, 5],
    "stash": ["never", "except-last", "always", "offload", "mixed"],
    "replicas": [1, 1, 2, 3],
    "sizes": [(9, 4), (12, 6), (14, 7), (3, 8), (1, 2), (7, 1)],
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "loss": list(LOSSES),
    "runner": ["step", "step", "called", "called", "observed", "critical", "optimizers of stages"],
    "home": [*["threads"] * 6, "apart", "strict"],  # the last of which is slow
}


# Of modes on devices of torch.
AMONG_DEVICES = VALUES | {
    "scenario": [
        *("linear", "norm", "in place", "other layout", "half detached", "batch norm"),
        *("dropout", "noise", "random relu", "tied ends", "frozen front", "linear in three stages"),
        *("embedding tied to a head", "input is a nest", "tokens", "all at once", "hourglass", "woven"),
        *("attention", "spectral norm", "transformer in three stages", "pooled images", "packed", "residual"),
    ],
    "dtype": [torch.float64],
}


def drawn(choose: random.Random, among: Mapping[str, list[Any]] = VALUES, **given: Any) -> Mode:
    """Return a possible mode with these settings, the others drawn."""
    while True:
        mode = Mode(**{name: given.get(name, choose.choice(values)) for name, values in among.items()})
        if mode.possible:
            return mode


@functools.cache
def pairs(mode: Mode) -> frozenset[Any]:
    """Every two settings that meet in a mode. Scenarios meet the ways to go backward, not each schedule."""
    family = (mode.schedule[0] in SPLITTING, mode.schedule[1] > 1, mode.schedule == DRAWN)
    settings = [(field.name, getattr(mode, field.name)) for field in fields(mode)]
    found = {tuple(pair) for pair in itertools.combinations(settings, 2)}
    apart = {pair for pair in found if {"scenario", "schedule"} != {pair[0][0], pair[1][0]}}
    return frozenset(apart | {(mode.scenario, family)})


def covering(
    choose: random.Random, each: int, among: Mapping[str, list[Any]] = VALUES, tries: int = 12
) -> Iterator[Mode]:
    """Yield some modes of each scenario, in which nearly every two settings that can meet do."""
    seen: set[Any] = set()
    for name in among["scenario"] * each:
        best = max(
            (drawn(choose, among, scenario=name) for _ in range(tries)),
            key=lambda mode: len(pairs(mode) - seen),
        )
        seen |= pairs(best)
        yield best


def all_modes() -> Iterator[Mode]:
    """Yield modes of all scenarios, and some that are drawn seldom."""
    choose = random.Random(0)
    yield from covering(choose, each=2)
    yield drawn(choose, schedule=("chimera", 1), runner="optimizers of stages")
    yield drawn(choose, scenario="all at once", runner="compiled", schedule=("zb-h1", 1), devices=3)
    for name in [name for name, scenario in SCENARIOS.items() if scenario.shared]:
        yield drawn(choose, scenario=name, home="apart")
