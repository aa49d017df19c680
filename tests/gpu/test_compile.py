"""compile=True on a GPU: torch's own compiler computes the same up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support.chains import on_device, plan_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.plain import assert_close, gradients, in_double, micro_batched_step, twin

DEVICE = "cuda:0"
loss_fn = nn.MSELoss()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("wish", [True, {"backend": "aot_eager"}], ids=str)
def test_compiled_stages_train_to_the_numbers_of_the_plain_model(wish):
    torch.compiler.reset()
    model = in_double(
        [linear(), nn.BatchNorm1d(WIDTH), nn.GELU(), linear(), nn.LayerNorm(WIDTH), linear()]
    ).to(DEVICE)
    plain = twin(model)
    plan = plan_by_hand([name for name, _ in model.named_children()], [3], micro_batches=4)
    pipe = Pipeline(model, on_device(plan, DEVICE), loss_fn, compile=wish)
    with pipe:
        for _ in range(5):
            x, y = (torch.randn(8, WIDTH).double().to(DEVICE) for _ in range(2))
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, 4)
            assert_close(gradients(model), gradients(plain), 1e-9)
            assert_close(statistics(model), statistics(plain), 1e-9)
