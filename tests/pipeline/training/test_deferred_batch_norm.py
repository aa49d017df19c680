"""Deferred BatchNorm: running statistics of the whole mini-batch, whatever it is split into."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

LOSS = nn.MSELoss()


def deferred(model: nn.Sequential, borders: list[int], **options: Any) -> Pipeline:
    return cut_by_hand(model, borders, loss_fn=LOSS, deferred_batch_norm=True, **options)


class Beside(nn.Module):
    """A BatchNorm whose output nothing but the loss sees, so that later inputs are those of the whole mini-batch."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.norm(x)


def network(**settings: Any) -> nn.Sequential:
    layers = [Beside(4, **settings), nn.Linear(4, 5), nn.Tanh(), Beside(5, **settings), nn.Linear(5, 2)]
    return plain.in_double(layers)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    ("schedule", "recompute", "momentum", "strict"),
    [
        ("1f1b", "never", 0.1, True),
        ("gpipe", "always", None, False),
        ("zb-h1", "except-last", 0.1, False),
        ("1f1b", "always", None, True),
    ],
)
def test_running_statistics_are_those_of_the_whole_mini_batch(schedule, recompute, momentum, strict):
    """After several steps, the last with fewer samples, and after forwards that the caller differentiates or not."""
    model = network(momentum=momentum)
    reference = plain.twin(model)
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "strict": strict}
    with deferred(model, [1, 3], micro_batches=4, **options) as pipe:
        for samples in (12, 10, 8):
            x, y = torch.randn(samples, 4).double() + 3, torch.randn(samples, 2).double()
            pipe.step(x, target=y)
            pipe(x + 1).pow(2).sum().backward()
            with torch.no_grad():
                pipe(x - 1)
            with torch.inference_mode():
                pipe(x - 2)
            for shift in (0, 1, -1, -2):
                reference(x + shift)
    plain.assert_close(statistics(model), statistics(reference))
    assert model.state_dict()["0.norm.num_batches_tracked"] == 3 * 4


def test_a_step_that_fails_updates_nothing():
    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Calls(fail))
    before = copy.deepcopy(statistics(model))
    with deferred(model, [2]) as pipe, pytest.raises(ArithmeticError, match="on purpose"):
        pipe.step(torch.randn(9, 4), target=torch.randn(9, 4))
    plain.assert_same(statistics(model), before)
    assert model.get_submodule("1").track_running_stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_adds_up_in_full(dtype):
    """Under autocast, with a mean that is large beside the deviations."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = (torch.randn(64, 4) + 100).bfloat16().float()
    with deferred(model, [1], micro_batches=4) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(x.to(dtype), target=torch.randn(64, 2))
    found = statistics(model)
    plain.assert_near(found["0.running_mean"], 0.1 * x.mean(0), 1e-6)
    plain.assert_near(found["0.running_var"], 0.9 + 0.1 * x.var(0), 1e-5)


def test_several_copies_of_the_model_are_refused_where_there_is_a_norm():
    with pytest.raises(ValueError, match=r"layer '0' is in several copies of the model"):
        deferred(network(), [3], replicas=2)
