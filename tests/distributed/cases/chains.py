"""Trainings of one chain of layers under every schedule and every option that a plan has."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipepart import Pipeline
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, adam, drawn_batches, trained, trained_by_caller
from tests.pipeline.conformance.runners import SCHEDULES, Mode, as_dtype, asking, drawn, sgd
from tests.pipeline.conformance.scenarios import SCENARIOS
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import Own
from tests.support.searched import drawn_plan, names_of, network


def chain(tied: bool = False) -> nn.Sequential:
    """Thirteen layers, some of which draw."""
    layers = [layer for _ in range(4) for layer in (linear(), nn.Dropout(0.2), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers, linear()).double()
    if tied:
        model[12].weight = model[0].weight
    return model


class How(NamedTuple):
    """A way to train the chain. With ``caller``, the caller goes backward from a loss of its own."""

    schedule: str
    stages: int
    chunks: int = 1
    recompute: Any = "never"
    micro_batches: int = 5
    tied: bool = False
    replicas: int = 1
    compress: Any = None
    offload: Any = "never"
    stage_optimizers: bool = False
    caller: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in self if value not in ("never", False, None))


def cut(how: How, **options: Any) -> Pipeline:
    """The chain in stages of as many layers each, give or take one."""
    return cut_by_hand(
        chain(how.tied),
        [13 * stage // how.stages for stage in range(1, how.stages)],
        loss_fn=nn.MSELoss(),
        timeout=TIMEOUT,
        **{name: getattr(how, name) for name in ("schedule", "chunks", "micro_batches", "replicas")},
        **{name: getattr(how, name) for name in ("recompute", "compress", "offload")},
        **options,
    )


# In replicas, with compressed messages, with several devices a rank.
@on(2, How("1f1b", 1, replicas=2), slow=True)
@on(2, How("zb-v", 2, 2, replicas=2), slow=True)
@on(4, How("1f1b", 2, replicas=2, recompute="always"), slow=True)
@on(4, How("zb-h1", 2, replicas=2, recompute="except-last"), slow=True)
@on(2, How("gpipe", 1, replicas=2))
@on(2, How("1f1b", 2, replicas=2, tied=True, stage_optimizers=True))
@on(4, How("1f1b", 2, replicas=2, caller=True, micro_batches=4), slow=True)
@on(2, How("1f1b", 2, compress="bf16"), slow=True)
@on(2, How("zb-v", 4, 2, compress="int8", recompute="always"))
@on(3, How("zb-h1", 3, compress="int8"), slow=True)
@on(4, How("gpipe", 2, replicas=2, compress="int8", recompute="except-last"), slow=True)
@on(2, How("1f1b", 4, micro_batches=8), slow=True)
@on(2, How("interleaved-1f1b", 8, 2, micro_batches=8, tied=True))
@on(2, How("zb-v", 8, 2, micro_batches=8), slow=True)
@on(2, How("1f1b", 2, offload=("stash", "never"), recompute=("never", "except-last")))
@on(2, How("1f1b", 2, tied=True, caller=True), slow=True)
@on(3, How("gpipe", 3, recompute="always", tied=True, caller=True))
@on(2, How("interleaved-1f1b", 4, 2, tied=True, caller=True, micro_batches=4), slow=True)
@on(4, How("zb-v", 8, 2, caller=True), slow=True)
@on(3, How("zb-h1", 3, recompute="except-last", caller=True))
def in_a_chain(how: How) -> dict[str, Any]:
    """Three steps, one of them with fewer samples than micro-batches; gradients are clipped."""
    if how.caller:
        return trained_by_caller(cut(how), nn.MSELoss())
    pipe = cut(how, optimizer=adam) if how.stage_optimizers else cut(how)
    batches = drawn_batches([12, 3, 12])
    for x, _ in batches:
        x.requires_grad_()
    optimizer, max_norm = (None, None) if how.stage_optimizers else (adam, 0.2)
    found = trained(pipe, batches, optimizer, max_norm)
    return {**found, "inputs": [x.grad for x, _ in batches]}


def in_mode(mode: Mode) -> dict[str, Any]:
    """Three steps, the second of them short; on strict devices each rank counts the memory of its own."""
    pipe = mode.pipeline(mode.what.make().to(mode.dtype), timeout=TIMEOUT)
    kept = {}
    if mode.home == "strict":
        kept = {name: (use.by_category["parameters"], use.peak > 0) for name, use in pipe.memory().items()}
    torch.manual_seed(1)
    samples = mode.sizes[0]
    sizes = samples, max(samples // 2, 2), samples
    batches = [(asking(x), y) for x, y in (as_dtype(mode.what.batch(size), mode.dtype) for size in sizes)]
    optimizer = sgd if mode.what.sparse else adam
    found = trained(pipe, batches, optimizer, max_norm=None if mode.what.sparse else 0.5)
    inputs = [[leaf.grad for leaf in tree_leaves(x)] for x, _ in batches]
    return {**found, "inputs": inputs, "memory": Own(kept)}


def drawn_for_ranks(choose: random.Random, processes: int, **given: Any) -> Mode:
    """A mode that several processes can run: no replicas, no emulation."""
    given = {"stash": choose.choice(["never", "except-last", "always"]), "home": "threads", **given}
    return drawn(choose, **given, devices=processes, replicas=1, runner="step")


def list_modes() -> None:
    """List every kind of layers and every schedule, on 2 to 4 ranks; and strict devices."""
    choose = random.Random(0)
    kinds = [name for name, one in SCENARIOS.items() if not (one.alone or one.on_host or name == "anything")]
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
        plan = drawn_plan(choose, names_of(model), micro_batches=choose.randint(2, 5))
        if len(plan.workers) == len(plan.cluster) == processes:
            break
    pipe = Pipeline(model, plan, nn.MSELoss(), timeout=TIMEOUT)
    return trained(pipe, drawn_batches([10, 10, 5]), max_norm=0.5)
