"""Under torchrun every training has the bits of one process, whatever the order in which messages are sent."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch

from pipepart.runtime.engine import Engine
from pipepart.runtime.transport import ordered
from schedules import Kind
from tests.distributed.cases.chains import drawn_for_ranks, in_any_order, in_mode, mode
from tests.distributed.cases.layers import tied_and_recorded
from tests.distributed.cases.losses import divided_by_what_all_micro_batches_count
from tests.distributed.cases.registry import CASES, Case, Function, params
from tests.pipeline.conformance.runners import SCHEDULES
from tests.support.deferred import Tied
from tests.support.ranks import assert_as_in_one_process
from tests.support.seeds import seeds

import_module("tests.distributed.cases.callers")


@pytest.mark.parametrize("case", params(CASES.values()))
def test_a_training_has_the_bits_of_one_process(case):
    assert_as_in_one_process(case.function, case.processes, *case.args)


@pytest.mark.slow
def test_values_from_files(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    files.save_model(Tied(), str(tmp_path / "model.safetensors"))
    assert_as_in_one_process(tied_and_recorded, 3, "files", tmp_path)


def without_tags(function: Function, *args: Any) -> Mapping[str, Any]:
    """Run a case with messages that all ranks take in one order, as over NCCL; that they were is checked.

    From the second step of a form on, each message goes by the communicator of its edge.
    """
    before, sent = ordered.Ordered.send, []

    def send(self: ordered.Ordered, key: Any, buffers: Any) -> None:
        sent.append(key)
        before(self, key, buffers)

    with (
        mock.patch.object(ordered, "direct_backend", return_value="gloo"),
        mock.patch.object(ordered.Ordered, "send", send),
    ):
        found = function(*args)
    assert sent or not torch.distributed.is_initialized()
    return found


ONE_ORDER = [
    *(
        Case(size, in_mode, (mode(size, *one, stash="except-last"),), slow=number not in (7, 12))
        for number, one in enumerate(SCHEDULES)
        if one[1] <= 2 and one[0] != "chimera"
        for size in [2 + 2 * (number % 2)]
    ),
    Case(3, divided_by_what_all_micro_batches_count, ("ignored", "zb-h1"), slow=True),
    Case(3, in_mode, (mode(3, scenario="all at once"),), slow=True),
    Case(3, in_mode, (mode(3, scenario="packed"),), slow=True),
    Case(4, in_mode, (mode(4, "zb-h1", scenario="hourglass"),)),
    Case(4, in_any_order, (2, 4), slow=True),
    Case(2, in_mode, (mode(2, "zb-v", 2, scenario="tied ends", stash="always", runner="called"),)),
    Case(4, in_mode, (mode(2, replicas=2, runner="called"),), slow=True),
]


@pytest.mark.parametrize("case", params(ONE_ORDER))
def test_messages_that_are_sent_in_one_order(case):
    assert_as_in_one_process(without_tags, case.processes, case.function, *case.args)


def on_the_callers_thread(one_order: bool) -> Mapping[str, Any]:
    """Backwards that run on the thread of the caller, as on accelerators."""
    execute = Engine.execute

    def here(self: Engine, step: Any, on_workers: bool = True) -> None:
        kinds = {action.kind for row in step.schedule.actions for action in row}
        execute(self, step, on_workers and Kind.F in kinds)

    with mock.patch.object(Engine, "execute", here):
        how = mode(3, scenario="tied ends", stash="always", runner="called")
        return without_tags(in_mode, how) if one_order else in_mode(how)


@pytest.mark.parametrize("one_order", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_backward_on_the_callers_thread(one_order):
    assert_as_in_one_process(on_the_callers_thread, 3, one_order)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("one_order", [False, True])
@pytest.mark.parametrize("processes", [2, 4])
def test_stages_anywhere_act_in_any_order(processes, one_order):
    case = partial(without_tags, in_any_order) if one_order else in_any_order
    for seed in seeds(8, f"orders on {processes} ranks {one_order}"):
        assert_as_in_one_process(case, processes, seed, processes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_schedule_with_fewer_samples_than_micro_batches(processes):
    choose = random.Random(processes)
    for schedule in SCHEDULES:
        if processes * schedule[1] > 7 or schedule[0] == "chimera":
            continue
        mode = drawn_for_ranks(choose, processes, schedule=schedule, sizes=(3, 8), scenario="linear")
        assert_as_in_one_process(in_mode, processes, mode)
