"""Under torchrun every schedule trains to the bits of one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import nn

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.distributed.training import TIMEOUT, drawn_batches, trained
from tests.pipeline.conformance.kinds import KINDS
from tests.pipeline.conformance.modes import LOSSES, SCHEDULES, Mode, drawn, stages_of
from tests.support.chains import cut_by_hand
from tests.support.ranks import assert_as_in_one_process
from tests.support.searched import drawn_plan, names_of, network
from tests.support.seeds import seeds


def in_mode(mode: Mode) -> dict[str, Any]:
    """Three steps, the second of them short, of a chain of one kind of layers."""
    model = KINDS[mode.kind].chain().to(mode.dtype)
    borders, recompute = stages_of(mode, len(flatten(model)))
    pipe = cut_by_hand(
        model,
        borders,
        loss_fn=LOSSES[mode.loss][0],
        micro_batches=mode.sizes[1],
        schedule=mode.schedule[0],
        chunks=mode.schedule[1],
        recompute=recompute,
        timeout=TIMEOUT,
    )
    samples = mode.sizes[0]
    batches = drawn_batches([samples, max(samples // 2, 2), samples], dtype=mode.dtype)
    for x, _ in batches:
        x.requires_grad_()
    found = trained(pipe, batches, max_norm=0.5)
    found["inputs"] = [x.grad for x, _ in batches]
    return found


def modes() -> list[tuple[int, Mode]]:
    """Every kind of layers and every schedule, on 2 to 4 ranks."""
    choose = random.Random(0)
    found = []
    kinds = [name for name, kind in KINDS.items() if not kind.sparse]
    schedules = [(name, chunks) for name, chunks in SCHEDULES if name != "chimera" and chunks < 4]
    for number in range(max(len(kinds), len(schedules))):
        given = {"kind": kinds[number % len(kinds)], "schedule": schedules[number % len(schedules)]}
        processes = choose.choice([size for size in (2, 3, 4) if size * given["schedule"][1] <= 7])
        found.append((processes, drawn_for_ranks(choose, processes, **given)))
    return found


def drawn_for_ranks(choose: random.Random, processes: int, **given: Any) -> Mode:
    """A mode that several processes can run: no replicas, no emulation."""
    return drawn(choose, **given, devices=processes, replicas=1, strict=False, drop_in=False)


@pytest.mark.parametrize(("processes", "mode"), modes(), ids=str)
def test_a_step_is_that_of_one_process(processes, mode):
    assert_as_in_one_process(in_mode, processes, mode)


def in_any_order(seed: int, processes: int) -> dict[str, Any]:
    """Stages anywhere, any legal order of actions; dropout, batch norms and a tied weight."""
    choose, model = random.Random(seed), network().double()
    while True:
        plan = drawn_plan(choose, names_of(model), micro_batches=choose.randint(2, 5))
        if len(plan.workers) == len(plan.cluster) == processes:
            break
    pipe = Pipeline(model, plan, nn.MSELoss(), timeout=TIMEOUT)
    return trained(pipe, drawn_batches([10, 10, 5]), max_norm=0.5)


@pytest.mark.parametrize(("seed", "processes"), [(0, 2), (1, 3), (2, 4), (3, 4)])
def test_stages_that_lie_anywhere_act_in_any_order(seed, processes):
    assert_as_in_one_process(in_any_order, processes, seed, processes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4])
def test_many_random_orders(processes):
    for seed in seeds(150, f"orders on {processes} ranks"):
        assert_as_in_one_process(in_any_order, processes, seed, processes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_schedule_in_several_sizes(processes):
    choose = random.Random(processes)
    for schedule in SCHEDULES:
        if processes * schedule[1] > 7 or (schedule[0] == "chimera" and processes > 2):
            continue
        for sizes in [(9, 4), (14, 7), (3, 8)]:
            mode = drawn_for_ranks(choose, processes, schedule=schedule, sizes=sizes, kind="linear")
            assert_as_in_one_process(in_mode, processes, mode)
