"""A process that runs some stages records the whole model by itself, and replays its own layers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError
from pipepart.capture import RecordedChain, chain_of, fingerprint
from pipepart.data.recorded import entered
from pipepart.data.split import micro_batches_of
from tests.support.chains import plan_by_hand
from tests.support.deferred import Tied, deferred, twins
from tests.support.local_stages import (
    AsksBetween,
    AsksForMask,
    Block,
    Blocks,
    Process,
    output,
    process,
)
from tests.support.recorded import borders_of, chain_for


def processes(make: Callable[[], nn.Module], sample: Any, stages: int = 3, **options: Any) -> tuple[Any, ...]:
    """Return the chain of the whole model, a plan with a stage for each process, and the processes."""
    whole = chain_for(twins(make)[0], sample, parts=1)
    layers = [name for name, _ in whole.layers]
    plan = plan_by_hand(layers, borders_of(len(layers), stages), micro_batches=1)
    found = [
        process(deferred(make), plan, {stage}, groups=whole.groups, **options) for stage in range(stages)
    ]
    return whole, plan, found


def record(chain: Any, sample: Any) -> Any:
    batch = micro_batches_of(Arguments.of(sample).input, None, 1)
    return entered(chain, batch).inputs[0].recording


class AsksWhatItWrote(Blocks):
    """Reads a tensor of its own, into which it has written what a block computed."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        total = torch.zeros(1)
        for block in self.blocks:
            x = block(x)
            total += x.sum()
        return x * 2 if total > 0 else x


class Sorting(Block):
    """Computes only the positive samples: how many these are is known from values only."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.sum(1).gt(0).nonzero()[:, 0]
        return input.index_add(0, rows, super().forward(input[rows]))


class ReadsWithin(Blocks):
    block = Sorting


def partial(model: nn.Module, groups: Any = None, **options: Any) -> RecordedChain:
    chain = chain_of(model, split_loss=False, **options)
    assert isinstance(chain, RecordedChain)
    chain.use_fake_parameters()
    return chain


def test_a_process_may_know_no_more_than_shapes():
    chain = partial(Blocks())
    known = record(chain, torch.randn(4, 4))
    assert fingerprint(record(chain, torch.randn(4, 4, device="meta"))) == fingerprint(known)
    with pytest.raises(
        CaptureError, match=r"bool.* reads values .*local_stages.py.*pass that in every process"
    ):
        record(partial(AsksForMask()), Arguments(torch.randn(4, 4), torch.ones(4, device="meta")))


@pytest.mark.parametrize("make", [AsksBetween, AsksWhatItWrote])
def test_values_of_layers_cannot_be_read_between_them(make):
    with pytest.raises(
        CaptureError, match=r"bool.* reads values of tensors at .*(test_recorded|local_stages)\.py:\d+"
    ):
        record(partial(make()), torch.randn(4, 4))


def test_values_cannot_be_read_in_a_layer():
    with pytest.raises(
        CaptureError, match=r"layer 'blocks\.1' reads values of tensors at .*recorded\.py:\d+"
    ):
        record(partial(ReadsWithin()), torch.randn(4, 4))


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(4)


class ScalesByFirst(Blocks):
    """Uses a tensor of its first block, which is no buffer, behind the last one."""

    block = Scaled

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first: Any = self.blocks[0]
        return super().forward(x) * first.scale


def test_an_attribute_of_a_module_of_another_process_has_values():
    sample = torch.randn(4, 4)
    whole, plan, found = processes(ScalesByFirst, sample, split_loss=False)
    expected = output([Process(whole.model, whole)] * 3, plan, sample)
    assert torch.equal(output(found, plan, sample), expected)


def test_nothing_is_left_in_the_model():
    model = Tied()
    before = {name: (tensor, tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    record(partial(model), torch.randint(12, (8,)))
    now = model.state_dict(keep_vars=True)
    assert all(
        now[name] is tensor and tensor._version == version for name, (tensor, version) in before.items()
    )
    assert type(model.table) is Tensor


class Alternating(Blocks):
    """Changes its way from forward to forward, by a counter that is out of sight."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * (2 + next(TURNS) % 2)


TURNS = itertools.count()  # whose position no snapshot reads


def test_forwards_that_take_different_ways_are_refused():
    with pytest.raises(CaptureError, match=r"two recordings of Alternating differ.*given \d in one forward"):
        record(partial(Alternating()), torch.randn(4, 4))
    record(partial(Alternating(), verify="never"), torch.randn(4, 4))


def test_recordings_that_differ_have_other_fingerprints():
    prints = [
        fingerprint(record(partial(AsksForMask()), Arguments(torch.randn(4, 4), mask)))
        for mask in (torch.ones(4), torch.zeros(4))
    ]
    prints.append(fingerprint(record(partial(Blocks()), torch.randn(4, 4))))
    assert len(set(prints)) == 3
