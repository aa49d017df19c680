"""Live values that go past stages train with the numbers of the plain model, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipepart import Arguments, Pipeline
from tests.capture import handwritten
from tests.support.chains import plan_by_hand
from tests.support.recorded import assert_same_step, borders_of, chain_for, differing, piped
from tests.support.skipping import WIDTH, Hourglass, Woven, relayed


def _noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HOURGLASS = _noise(8, 3, WIDTH), _noise(8, 3, WIDTH, seed=2)
MASK = torch.randint(3, (8, WIDTH), generator=torch.Generator().manual_seed(3))
WOVEN = Arguments(_noise(8, WIDTH), MASK), _noise(8, WIDTH, seed=4)
IMAGES = _noise(8, 3, 8, 8), _noise(8, 2, 8, 8, seed=3)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_a_u_net(stages, recompute):
    torch.manual_seed(0)
    assert_same_step(
        handwritten.UNet(),
        IMAGES[0],
        target=IMAGES[1],
        loss_fn=F.mse_loss,
        stages=stages,
        parts=4,
        recompute=recompute,
        strict=recompute != "always",
    )


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"),
    [
        ("gpipe", 8, 1),
        ("1f1b", 8, 1),
        ("eager-1f1b", 4, 1),
        ("sequential", 4, 1),
        ("zb-h1", 8, 1),
        ("zb-h2", 4, 1),
        ("interleaved-1f1b", 8, 2),
        ("interleaved-zb", 8, 2),
        ("hanayo", 8, 2),
        ("zb-v", 8, 2),
        ("v-half", 8, 2),
        ("dualpipe-v", 8, 2),
    ],
)
def test_every_kind_of_schedule(schedule, stages, chunks):
    torch.manual_seed(0)
    x, y = HOURGLASS
    settings: dict[str, Any] = {
        "loss_fn": F.mse_loss,
        "stages": stages,
        "parts": 8,
        "schedule": schedule,
        "chunks": chunks,
    }
    assert_same_step(Hourglass(), x, target=y, strict=True, **settings)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_values_with_several_uses_and_masks(schedule, recompute):
    torch.manual_seed(0)
    x, y = WOVEN
    assert_same_step(
        Woven(),
        x,
        target=y,
        loss_fn=F.mse_loss,
        stages=9,
        parts=4,
        schedule=schedule,
        recompute=recompute,
        strict=True,
    )


def assert_as_relayed(make_pipe: Callable[[nn.Module], Pipeline]) -> None:
    """Assert that a step leaves the gradients and parameters that it leaves where stages relay all values."""
    x, y = HOURGLASS
    torch.manual_seed(0)
    model = Hourglass()
    other = copy.deepcopy(model)
    with make_pipe(model) as pipe:
        pipe.step(x, target=y)
    with relayed(), make_pipe(other) as pipe:
        pipe.step(x, target=y)
    assert differing(model, other) == []
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(("schedule", "chunks"), [("looped-bfs", 2), ("chimera", 1), ("pipedream", 1)])
def test_as_relayed_where_sums_have_another_order_or_weights_are_stale(schedule, chunks):
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss,
        "stages": 4,
        "parts": 4,
        "schedule": schedule,
        "chunks": chunks,
    }
    if schedule == "pipedream":
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    assert_as_relayed(lambda model: piped(model, HOURGLASS[0], **options))


def test_replicas():
    def make_pipe(model: nn.Module) -> Pipeline:
        chain = chain_for(model, HOURGLASS[0], loss_fn=F.mse_loss, parts=4)
        names = [name for name, _ in chain.layers]
        plan = plan_by_hand(names, borders_of(len(names), 4), micro_batches=4, replicas=2)
        return Pipeline(chain, plan, F.mse_loss)  # type: ignore[arg-type]

    assert_as_relayed(make_pipe)


def test_the_differentiable_forward_and_evaluation():
    x, y = HOURGLASS
    torch.manual_seed(0)
    model = Hourglass()
    plain = copy.deepcopy(model)
    with piped(model, x, loss_fn=F.mse_loss, stages=4, parts=1) as pipe:
        given = x.clone().requires_grad_()
        pipe(given).square().sum().backward()
        value = pipe.evaluate(x, target=y)
    expected = x.clone().requires_grad_()
    plain(expected).square().sum().backward()
    assert differing(model, plain) == []
    torch.testing.assert_close(given.grad, expected.grad, rtol=0, atol=0)
    assert torch.equal(value, F.mse_loss(plain(x), y))


def test_micro_batches_of_other_recordings_have_their_own_ways():
    torch.manual_seed(0)

    class Shifting(Hourglass):
        def forward(self, x):
            kept = []
            for block in self.down:
                kept.append(x := block(x))
            order = kept if len(x) > 2 else kept[::-1]  # so the size of the batch decides how far values skip
            for block, skip in zip(self.up, order, strict=True):
                x = block(torch.cat([x, skip], dim=-1))
            return x

    x, y = _noise(5, WIDTH), _noise(5, WIDTH, seed=2)  # micro-batches of 3 and 2 samples
    assert_same_step(Shifting(4), x, target=y, loss_fn=F.mse_loss, stages=4, parts=2)
