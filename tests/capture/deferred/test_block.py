"""The block of ``deferred_init``: what it leaves behind, and what it refuses."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pipepart import CaptureError, Pipeline, deferred_init
from pipepart.capture import deferred


def test_nothing_has_memory_and_nothing_is_drawn():
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    with deferred_init():
        model = nn.Sequential(nn.Linear(1 << 17, 1 << 17), nn.BatchNorm1d(4))  # 64 GiB
        torch.randn(3, generator=generator)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    assert not torch.empty(1).is_meta


def test_generators_are_restored_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), deferred_init():
        nn.Linear(int(1 / 0), torch.rand(3).numel())
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_memories_that_are_asked_for_are_computed():
    torch.manual_seed(0)
    with deferred_init():
        layers = [nn.Linear(3, 3) for _ in range(4)]
    torch.manual_seed(0)
    expected = [nn.Linear(3, 3) for _ in range(4)][2].weight
    got = []
    deferred.values_of([layers[2].weight], lambda tensor, values: got.append(values))
    assert len(got) == 1
    assert torch.equal(got[0], expected)


def test_a_block_within_a_block_belongs_to_it():
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    with deferred_init():
        first = nn.Linear(3, 3)
        with deferred_init():
            second = nn.Linear(3, 3)
    got: dict[int, torch.Tensor] = {}
    deferred.values_of([first.weight, second.weight], lambda tensor, values: got.update({id(tensor): values}))
    assert torch.equal(got[id(first.weight)], expected.get_parameter("0.weight"))
    assert torch.equal(got[id(second.weight)], expected.get_parameter("1.weight"))


_THERE = torch.ones(3)


def under_autocast() -> None:
    with torch.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: nn.Linear(2, 2).to("cuda"), "puts a tensor on cuda"),
        (lambda: torch.empty(2, device="cuda"), "puts a tensor on cuda"),
        (lambda: torch.rand(3).to_sparse(), "no plain memory"),
        (lambda: _THERE.uniform_(), "made outside of the block"),
        (under_autocast, "autocast"),
    ],
)
def test_what_cannot_be_deferred_is_refused(refused, why):
    with pytest.raises(CaptureError, match=why), deferred_init():
        refused()


def test_an_array_that_changes_later_is_refused():
    array = torch.ones(3).numpy()
    with deferred_init():
        model = nn.Module()
        model.register_buffer("shared", torch.from_numpy(array))
        model.register_buffer("doubled", torch.from_numpy(array) * 2)
        array[:] = 5
    got = []
    deferred.values_of([model.get_buffer("doubled")], lambda tensor, values: got.append(values))
    assert torch.equal(got[0], torch.full((3,), 2.0))
    with pytest.raises(CaptureError, match="numpy array that was changed"):
        deferred.values_of([model.get_buffer("shared")], lambda tensor, values: got.append(values))


AFTERWARDS = {
    "init": lambda model: nn.init.zeros_(model.weight),
    "init of data": lambda model: nn.init.normal_(model.weight.data, 0.0, 0.02),
    "in place": lambda model: model.weight.data.mul_(2),
    "dtype": lambda model: model.half(),
    "new data": lambda model: setattr(model.weight, "data", model.weight.data * 2),
}


@pytest.mark.parametrize("change", AFTERWARDS)
def test_changes_after_the_block_are_refused(change):
    with deferred_init():
        model = nn.Linear(3, 3)
    deferred.refuse_unknown([("parameter 'weight'", model.weight)], weights=False)
    AFTERWARDS[change](model)
    with pytest.raises(CaptureError, match=r"parameter 'weight'.* (in|into) the block"):
        deferred.refuse_unknown([("parameter 'weight'", model.weight)], weights=False)


def test_lazy_layers_without_shapes_are_refused():
    with deferred_init():
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(CaptureError, match=r"'0.weight' is of a lazy layer without shapes"):
        Pipeline.auto(model, torch.randn(4, 4), devices=2)


def test_writes_to_attributes_after_the_block_are_refused():
    with deferred_init():
        inner: Any = nn.Module()
        inner.table = [torch.arange(3.0)]  # a tensor that is neither parameter nor buffer
        model = nn.Sequential(inner)  # registers no parameter and no buffer
    (named,) = deferred.attributes_of(model[0])
    deferred.refuse_unknown([named], weights=False)
    named[1].mul_(2)
    with pytest.raises(CaptureError, match=r"table was written after .*load_state_dict"):
        deferred.refuse_unknown([named], weights=False)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_after_the_block_is_refused(copy_of):
    with deferred_init():
        model = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match=r"all copies, .* in the block"):
        deferred.refuse_unknown([("parameter 'weight'", copy_of(model).weight)], weights=False)
