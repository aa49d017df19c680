"""Values that go past stages: which bytes go where, errors between, and micro-batches with other ways."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipepart import Arguments
from tests.support.recorded import assert_same_step, piped
from tests.support.skipping import WIDTH, Hourglass, Woven

X, Y = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
MASK = torch.ones(4, WIDTH, dtype=torch.int64)
VALUE = 2 * WIDTH * 4  # bytes of a value for one of two micro-batches


def moved(model: nn.Module, sample: Any, **options: Any) -> Counter[tuple[str, int, int]]:
    """The bytes of a step by (kind, sender, receiver)."""
    found: Counter[tuple[str, int, int]] = Counter()
    with piped(model, sample, loss_fn=F.mse_loss, parts=2, trace=True, **options) as pipe:
        pipe.step(Arguments.of(sample), target=Y)
        assert pipe.last_trace is not None
        for one in pipe.last_trace.transfers:
            found[str(one.kind), one.source, one.target] += int(one.bytes)
    return found


def test_values_go_from_their_maker_to_their_users_and_their_gradients_back() -> None:
    found = moved(Hourglass(6), X, stages=4)  # layers 0 1 2 | 3 4 5 | 5 4 3 | 2 1 0
    forward = {
        (0, 1): 2 * VALUE,  # the output of layer 2, which layer 3 uses
        (0, 3): 2 * 2 * VALUE,  # those of layers 0 and 1
        (1, 2): 3 * 2 * VALUE,  # those of layers 3, 4 and 5
        (1, 3): 2 * VALUE,  # that of layer 2 again
        (2, 3): 2 * VALUE,
    }
    assert {ends[1:]: size for ends, size in found.items() if ends[0] == "F"} == forward
    assert {ends[:0:-1]: size for ends, size in found.items() if ends[0] == "B"} == forward


def test_masks_have_no_way_back_and_a_value_with_several_uses_hops() -> None:
    found = moved(Woven(), (X, MASK), stages=9)
    past = {ends: size for ends, size in found.items() if abs(ends[1] - ends[2]) > 1}
    gradients = {("B", 4, 1): 2 * VALUE, ("B", 6, 4): 2 * VALUE, ("B", 7, 2): 2 * VALUE}
    values = {("F", 1, 4): 2 * VALUE, ("F", 4, 6): 2 * VALUE, ("F", 2, 7): 2 * VALUE}
    assert past == {("F", 0, 3): 2 * 2 * VALUE, ("F", 3, 8): 2 * 2 * VALUE, **values, **gradients}


def test_stages_on_one_device_hand_values_over() -> None:
    found = moved(Hourglass(4), X, stages=4, schedule="zb-v", chunks=2)  # stages 0 and 3 are on device 0
    assert ("F", 0, 3) not in found
    assert ("F", 1, 2) not in found
    assert found["F", 0, 1] == found["F", 2, 3] == 2 * VALUE


def test_micro_batches_of_other_recordings_have_their_own_ways() -> None:
    class Shifting(Hourglass):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for block in self.down:
                kept.append(x := block(x))
            order = kept if len(x) > 2 else kept[::-1]  # so the size of the batch decides how far values skip
            for block, skip in zip(self.up, order, strict=True):
                x = block(torch.cat([x, skip], dim=-1))
            return x

    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)  # micro-batches of 3 and 2 samples
    assert_same_step(Shifting(4), x, target=y, loss_fn=F.mse_loss, stages=4, parts=2)


def test_a_write_into_memory_of_a_value_that_went_past_the_writer_is_found() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, y.view(-1, WIDTH)

    class Writer(nn.Module):
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                with torch.no_grad():
                    x.mul_(2.0)
            return x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Twice(), Writer(), nn.Linear(WIDTH, WIDTH), nn.Tanh()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept, x = self.blocks[0](x)
            return self.blocks[3](self.blocks[2](self.blocks[1](x)) * kept)

    with piped(Model(), X, loss_fn=F.mse_loss, stages=4, parts=2) as pipe:
        pipe.step(X, target=Y)
        Writer.writes = True
        with pytest.raises(RuntimeError, match="overwritten"):
            pipe.step(X, target=Y)
