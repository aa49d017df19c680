"""Errors in a stage that values go past: they are raised with their type and notes, and no other stage hangs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipepart.runtime.failure.stalled import StepTimeoutError
from pipepart.runtime.transport.threads import ThreadTransport
from schedules import Kind
from tests.support.recorded import piped
from tests.support.skipping import WIDTH, Block, Hourglass, Woven

X, MASK, Y = torch.ones(8, WIDTH), torch.ones(8, WIDTH, dtype=torch.int64), torch.zeros(8, WIDTH)


class Fragile(Block):
    """Fails if its bias is infinite, forward, or minus infinite, backward: no attribute says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = float(self.linear.bias.detach()[0])
        if first == math.inf:
            raise ArithmeticError("a layer between")
        y = super().forward(x)
        if first == -math.inf and y.requires_grad:
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a backward between")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_layer_between_fails(where):
    model = Woven()
    model.blocks[4] = Fragile()
    with piped(model, (X, MASK), loss_fn=F.mse_loss, stages=9, parts=4, timeout=60) as pipe:
        expected = pipe.evaluate(X, MASK, target=Y)
        for _ in range(4):  # in most of which the recording is compared with the model itself
            pipe.step(X, MASK, target=Y)
        bias = model.get_parameter("blocks.4.linear.bias")
        before = bias.detach().clone()
        bias.data[0] = math.inf if where == "forward" else -math.inf
        with pytest.raises(ArithmeticError, match="between") as raised:
            pipe.step(X, MASK, target=Y)
        notes = "\n".join(raised.value.__notes__)
        assert "stage 4 of 9" in notes
        assert ("in the forward of layer 'blocks.4'" in notes) == (where == "forward")
        bias.data.copy_(before)
        assert torch.equal(pipe.step(X, MASK, target=Y), expected)


def test_a_stage_that_waits_for_a_value_says_so(monkeypatch):
    recv = ThreadTransport.recv

    def lost(self, receiver, key):
        kind, stage, micro_batch, *sender = key
        is_lost = kind is Kind.F and sender
        return recv(self, receiver, (kind, stage, micro_batch + 99, *sender) if is_lost else key)

    monkeypatch.setattr(ThreadTransport, "recv", lost)
    message = r"waits for the output of stage 1 on \S+ for micro-batch 99"
    with (
        piped(Hourglass(2), X, loss_fn=F.mse_loss, stages=4, parts=1, timeout=0.6) as pipe,
        pytest.raises(StepTimeoutError, match=message),
    ):
        pipe.step(X, target=Y)


def test_a_write_into_memory_of_a_value_that_went_past_the_writer_is_found():
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 2
            return y, y.view(-1, WIDTH)

    class Writer(nn.Module):
        writes = False

        def forward(self, x):
            if self.writes:
                with torch.no_grad():
                    x.mul_(2.0)
            return x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Twice(), Writer(), nn.Linear(WIDTH, WIDTH), nn.Tanh()])

        def forward(self, x):
            kept, x = self.blocks[0](x)
            return self.blocks[3](self.blocks[2](self.blocks[1](x)) * kept)

    with piped(Model(), X, loss_fn=F.mse_loss, stages=4, parts=2) as pipe:
        pipe.step(X, target=Y)
        Writer.writes = True
        with pytest.raises(RuntimeError, match="overwritten"):
            pipe.step(X, target=Y)
