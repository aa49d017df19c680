"""Trainings of the scenarios of one process under every schedule and every option that a plan has."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipepart import Pipeline
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, adam, drawn_batches, trained, trained_by_caller
from tests.pipeline.conformance.runners import SCHEDULES, Mode, as_dtype, asking, drawn, sgd
from tests.pipeline.conformance.scenarios import SCENARIOS
from tests.support.ranks import Own
from tests.support.searched import drawn_plan, network

_MODE = Mode(
    "dropout", ("1f1b", 1), 2, 2, "never", 1, (9, 5), torch.float64, "mean", runner="step", home="threads"
)

# Draws its own layers; messages that only one process takes.
EXCLUDED = ("anything", "sparse messages")


def mode(devices: int, schedule: str = "1f1b", chunks: int = 1, **changes: Any) -> Mode:
    """Trains layers that draw, on so many devices, with some settings that are not the usual ones."""
    return replace(_MODE, devices=devices, schedule=(schedule, chunks), **changes)


# In replicas, with compressed messages, with several devices a rank, by losses of the caller.
@on(2, mode(1, replicas=2), slow=True)
@on(2, mode(1, "zb-v", 2, replicas=2), slow=True)
@on(4, mode(2, replicas=2, stash="always"), slow=True)
@on(4, mode(2, "zb-h1", replicas=2, stash="except-last"), slow=True)
@on(2, mode(1, "gpipe", replicas=2))
@on(2, mode(2, replicas=2, scenario="tied ends", runner="optimizers of stages"))
@on(4, mode(2, replicas=2, runner="called"), slow=True)
@on(2, mode(2), {"compress": "bf16"}, slow=True)
@on(2, mode(2, "zb-v", 2, stash="always"), {"compress": "int8"})
@on(3, mode(3, "zb-h1"), {"compress": "int8"}, slow=True)
@on(4, mode(2, "gpipe", replicas=2, stash="except-last"), {"compress": "int8"}, slow=True)
@on(2, mode(4), slow=True)
@on(2, mode(4, "interleaved-1f1b", 2, scenario="tied ends"))
@on(2, mode(4, "zb-v", 2), slow=True)
@on(2, mode(2, stash="mixed"))
@on(2, mode(2, scenario="tied ends", runner="called"), slow=True)
@on(3, mode(3, "gpipe", scenario="tied ends", stash="always", runner="called"))
@on(2, mode(2, "interleaved-1f1b", 2, scenario="tied ends", runner="called"), slow=True)
@on(4, mode(4, "zb-v", 2, runner="called"), slow=True)
@on(3, mode(3, "zb-h1", stash="except-last", runner="called"))
@on(3, mode(3, scenario="packed"))
@on(3, mode(3, scenario="packed"), {"compress": "bf16"}, slow=True)
@on(2, mode(2, scenario="residual", border=1))
@on(2, mode(4, "gpipe", scenario="hourglass", stash="always"), slow=True)
@on(3, mode(3, scenario="hourglass"), {"compress": "int8"})
@on(3, mode(3, scenario="all at once", sizes=(12, 5), stash="always"))
@on(3, mode(3, scenario="generator of its own"))
def in_mode(mode: Mode, options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Four steps, two of them of fewer samples; on strict devices each rank counts the memory of its own."""
    pipe = mode.pipeline(mode.what.make().to(mode.dtype), timeout=TIMEOUT, **options)
    if mode.runner == "called":
        return trained_by_caller(pipe)
    kept = {}
    if mode.home == "strict":
        kept = {name: (use.by_category["parameters"], use.peak > 0) for name, use in pipe.memory().items()}
    torch.manual_seed(1)
    samples = mode.sizes[0]
    sizes = [samples, max(samples // 2, 2)] * 2
    batches = [(asking(x), y) for x, y in (as_dtype(mode.what.batch(size), mode.dtype) for size in sizes)]
    optimizer = sgd if mode.what.sparse else adam
    if pipe.optimizers:
        found = trained(pipe, batches, None)
    else:
        found = trained(pipe, batches, optimizer, max_norm=None if mode.what.sparse else 0.5)
    inputs = [[leaf.grad for leaf in tree_leaves(x) if isinstance(leaf, Tensor)] for x, _ in batches]
    return {**found, "inputs": inputs, "memory": Own(kept)}


def drawn_for_ranks(choose: random.Random, processes: int, **given: Any) -> Mode:
    """A mode that several processes can run: no replicas, no emulation."""
    given = {"stash": choose.choice(["never", "except-last", "always"]), "home": "threads", **given}
    return drawn(choose, **given, devices=processes, replicas=1, runner="step")


def list_modes() -> None:
    """List every kind of layers and every schedule, on 2 to 4 ranks; and strict devices."""
    choose = random.Random(0)
    kinds = [name for name, one in SCENARIOS.items() if not (one.alone or one.on_host or name in EXCLUDED)]
    orders = [(name, chunks) for name, chunks in SCHEDULES if name != "chimera" and chunks < 4]
    for number, kind in enumerate(kinds):
        schedule = orders[number % len(orders)]
        processes = choose.choice([size for size in (2, 3, 4) if size * schedule[1] <= 7])
        layers = SCENARIOS[kind].layers
        if processes * schedule[1] > layers:
            schedule, processes = ("1f1b", 1), min(processes, layers)
        mode = drawn_for_ranks(choose, processes, scenario=kind, schedule=schedule)
        on(processes, mode, slow=number % 8 != 1)(in_mode)
    for schedule in (("1f1b", 1), ("zb-v", 2), ("gpipe", 1)):
        mode = drawn_for_ranks(choose, 2, scenario="all at once", schedule=schedule, home="strict")
        on(2, mode, slow=schedule[1] == 1)(in_mode)


list_modes()


@on(2, 0, 2, slow=True)
@on(3, 1, 3)
@on(4, 2, 4, slow=True)
@on(4, 3, 4, slow=True)
def in_any_order(seed: int, processes: int) -> dict[str, Any]:
    """Stages anywhere, any legal order of actions; dropout, batch norms and a tied weight."""
    choose, model = random.Random(seed), network().double()
    while True:
        plan = drawn_plan(choose, list(map(str, range(len(model)))), micro_batches=choose.randint(2, 5))
        if len(plan.workers) == len(plan.cluster) == processes:
            break
    pipe = Pipeline(model, plan, nn.MSELoss(), timeout=TIMEOUT)
    return trained(pipe, drawn_batches([10, 10, 5]), max_norm=0.5)
