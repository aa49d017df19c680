"""A process that runs some stages has their tensors, with the values of the whole model, and no memory of others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipepart import Arguments, Plan
from pipepart.capture import Live, RecordedChain, chain_of, fingerprint
from pipepart.data.recorded import entered
from pipepart.data.split import micro_batches_of
from pipepart.runtime.build import build_stages
from pipepart.runtime.placing import InitialValues
from tests.distributed.cases.models import AsksForMask, Blocks, varied
from tests.support.chains import plan_by_hand
from tests.support.deferred import Tied, deferred, initialize
from tests.support.recorded import borders_of, chain_for
from tests.support.tensors_read import watched_reads
from tests.support.tied import language_model


def allocated(work: Callable[[], Any]) -> tuple[int, int]:
    """Run ``work``; return the most bytes of tensors on the CPU that it had allocated, and those at its end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    now = peak = 0
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return peak, now


LAYERS, SIZE = 8, 256
LAYER_BYTES = SIZE * SIZE * 4 + SIZE * 4
QUARTERS = plan_by_hand([str(index) for index in range(LAYERS)], [2, 4, 6], micro_batches=2)


def wide() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))


def fill(
    model: nn.Module, layers: Any, plan: Plan, local: Collection[int], weights: Path | None = None
) -> None:
    """Give a deferred model the layers of some stages."""
    torch.manual_seed(1)  # the seed of :func:`tests.support.deferred.twins`
    build_stages(layers, plan, values=InitialValues.of(model, weights, initialize), local=local)


@pytest.mark.parametrize("make", [varied, language_model])
def test_a_model_that_was_made_whole_gives_its_other_layers_back(make):
    model: Any = make()
    parameters = list(model.parameters())
    before = [tensor.clone() for tensor in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    plan = plan_by_hand([name for name, _ in model.named_children()], [2, 4], micro_batches=2)
    build_stages(list(model.named_children()), plan, local={1})
    assert all(map(operator.is_, model.parameters(), parameters))
    used = set(map(id, model[2:4].parameters()))
    for one, was in zip(parameters, before, strict=True):
        assert one.is_meta is (one.grad is None) is (id(one) not in used)
        assert one.is_meta or torch.equal(one, was)
    optimizer.step()  # a parameter without memory has no gradient


def test_a_process_allocates_its_share_of_a_deferred_model():
    model = deferred(wide)
    peak, kept = allocated(lambda: fill(model, list(model.named_children()), QUARTERS, {3}))
    share = sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)
    assert share == LAYERS * LAYER_BYTES // 4 <= kept < share + 4096
    assert peak < share + 2 * LAYER_BYTES


def test_a_model_that_was_made_whole_shrinks_to_the_share():
    def work() -> nn.Module:
        model = wide()
        build_stages(list(model.named_children()), QUARTERS, local={1})
        return model

    assert LAYERS * LAYER_BYTES // 4 <= allocated(work)[1] < LAYERS * LAYER_BYTES // 4 + 4096


def test_each_process_reads_its_own_tensors_from_files(tmp_path, monkeypatch):
    read, saved = watched_reads(monkeypatch), Tied()
    pytest.importorskip("safetensors.torch").save_model(saved, str(tmp_path / "model.safetensors"))
    chain: Any = chain_for(saved, torch.randint(12, (8,)))
    layers = [name for name, _ in chain.layers]
    plan = plan_by_hand(layers, borders_of(len(layers), 3), micro_batches=2)
    expected, found = saved.state_dict(), set[str]()
    for stage in range(3):
        read.clear()
        model = deferred(Tied)
        own_chain = RecordedChain(model, chain.groups)
        own_chain.use_fake_parameters()
        fill(model, own_chain.layers, plan, {stage}, tmp_path)
        own = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        assert read.keys() <= own.keys()
        assert sum(read.values()) == sum({one.data_ptr(): one.nbytes for one in own.values()}.values())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
        found |= own.keys()
    assert found == expected.keys()


def recorded(model: nn.Module, sample: Any) -> Any:
    chain: Any = chain_of(model, split_loss=False)
    chain.use_fake_parameters()
    value = entered(chain, micro_batches_of(Arguments.of(sample).input, None, 1)).inputs[0]
    assert isinstance(value, Live)
    return value.recording


def test_a_recording_needs_shapes_alone_and_another_way_has_another_fingerprint():
    known = fingerprint(recorded(Blocks(), torch.randn(4, 4)))
    assert fingerprint(recorded(Blocks(), torch.randn(4, 4, device="meta"))) == known
    masks = torch.ones(4), torch.zeros(4)
    others = [fingerprint(recorded(AsksForMask(), Arguments(torch.randn(4, 4), mask))) for mask in masks]
    assert len({known, *others}) == 3
