"""Random legal orders of actions over stages that lie anywhere, and plans by hand that have them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from pipepart import Cluster, Plan
from pipepart.planning import StagePlan
from pipepart.planning.costs.stage_memory import Mode
from schedules import Action, Kind, Schedule, check
from tests.support.pieces import WIDTH

# What stages do with their stashes; "offload" keeps them on the host.
MODES: list[Mode] = ["never", "never", "except-last", "always", "offload"]


def random_placement(choose: random.Random, stages: int, devices: int) -> tuple[int, ...]:
    """A device for each stage; each of the devices has one stage at least."""
    homes = [*range(devices), *(choose.randrange(devices) for _ in range(stages - devices))]
    choose.shuffle(homes)
    return tuple(homes)


def random_order(
    choose: random.Random, homes: Sequence[int], micro_batches: int, in_turn: bool = True
) -> Schedule:
    """Actions as they come if any one that can run is drawn, again and again; some backwards are split.

    ``homes``: the device of each stage. If ``in_turn``, a stage adds up gradients of micro-batches by their numbers.
    """
    stages = len(homes)
    chance = choose.choice([0.0, 0.5, 1.0])
    split = {(s, k): choose.random() < chance for s in range(stages) for k in range(micro_batches)}
    left = {
        Action(kind, stage, part)
        for (stage, part), apart in split.items()
        for kind in ((Kind.F, Kind.I, Kind.W) if apart else (Kind.F, Kind.B))
    }
    eager = {kind: choose.choice([0.1, 1.0, 10.0]) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    rows: list[list[Action]] = [[] for _ in range(max(homes) + 1)]
    while left:
        ready = sorted(action for action in left if _ready(action, left, stages, in_turn))
        (drawn,) = choose.choices(ready, [eager[action.kind] for action in ready])
        rows[homes[drawn.stage]].append(drawn)
        left.remove(drawn)
    found = Schedule("random", tuple(map(tuple, rows)), tuple(homes), micro_batches)
    check(found)
    return found


def _ready(action: Action, left: set[Action], stages: int, in_turn: bool) -> bool:
    """Return True if nothing that the action needs is left to be done."""
    kind, stage, part, _ = action

    def waits(kinds: Sequence[Kind], where: int, which: int | None) -> bool:
        return any(Action(one, where, which) in left for one in kinds)

    if kind is Kind.F:
        blocked = stage > 0 and waits([Kind.F], stage - 1, part)
    elif kind is Kind.W:
        blocked = waits([Kind.I], stage, part)
    else:
        blocked = waits([Kind.F], stage, part) or waits([Kind.B, Kind.I], stage + 1, part)
    if blocked or not in_turn:
        return not blocked
    # The same parts of earlier micro-batches come before; a full backward is both parts.
    alike = {Kind.F: [Kind.F], Kind.I: [Kind.B, Kind.I], Kind.W: [Kind.B, Kind.W]}
    before = alike.get(kind, [Kind.B, Kind.I, Kind.W])
    return not any(waits(before, stage, earlier) for earlier in range(part or 0))


def searched_plan(
    names: Sequence[str],
    borders: Sequence[int],
    order: Schedule,
    *,
    modes: Sequence[Mode] = (),
    spare: int = 0,
) -> Plan:
    """A plan with a stage between each two borders, that runs an order of its own; it says which stages share a device.

    The first ``spare`` devices of the cluster have no stage. The others are used from the last one on.
    """
    cluster = Cluster.virtual(order.devices + spare, threads=1)
    devices = [device.name for device in cluster.devices][::-1]
    edges = [0, *borders, len(names)]
    keeping: list[Mode] = ["never"] * order.stages
    stages = [
        StagePlan(
            layers=tuple(names[start:end]),
            device=devices[home],
            recompute="never" if mode == "offload" else mode,
            offload="stash" if mode == "offload" else "never",
        )
        for (start, end), home, mode in zip(pairwise(edges), order.device_of, modes or keeping, strict=False)
    ]
    return Plan(
        stages=tuple(stages),
        cluster=cluster,
        schedule="search",
        micro_batches=order.micro_batches,
        actions=tuple(tuple(map(str, row)) for row in order.actions),
    )


def drawn_plan(
    choose: random.Random, names: Sequence[str], in_turn: bool = True, micro_batches: int | None = None
) -> Plan:
    """A plan drawn as a whole: borders, placement, order, modes, a spare device, and micro-batches if not given."""
    stages = choose.randint(2, min(7, len(names)))
    homes = random_placement(choose, stages, choose.randint(1, min(4, stages)))
    order = random_order(choose, homes, micro_batches or choose.randint(1, 5), in_turn)
    return searched_plan(
        names,
        sorted(choose.sample(range(1, len(names)), stages - 1)),
        order,
        modes=choose.choices(MODES, k=stages),
        spare=choose.randint(0, 1),
    )


def network() -> nn.Sequential:
    """Dropout, two kinds of BatchNorm, a layer that writes into its input, and a tied weight."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.4),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(WIDTH, momentum=None),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH, bias=False),
    )
    model[8].weight = model[0].weight
    return model
