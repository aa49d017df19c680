"""Live values that go past stages: where weights are stale, in evaluation, and if each micro-batch has other ways."""

import copy

import torch
from torch.nn import functional as F

from tests.support.recorded import assert_same_step, differing, piped
from tests.support.skipping import WIDTH, Hourglass, relayed


def _noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_as_relayed_where_weights_are_stale():
    x, y = _noise(8, WIDTH), _noise(8, WIDTH, seed=2)
    models = [Hourglass(4)]
    models.append(copy.deepcopy(models[0]))

    def train(model: Hourglass) -> None:
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        with piped(
            model, x, loss_fn=F.mse_loss, stages=4, parts=4, schedule="pipedream", optimizer=optimizer
        ) as pipe:
            pipe.step(x, target=y)

    train(models[0])
    with relayed():
        train(models[1])
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_evaluation():
    x, y = _noise(8, WIDTH), _noise(8, WIDTH, seed=2)
    model = Hourglass(4)
    plain = copy.deepcopy(model)
    with piped(model, x, loss_fn=F.mse_loss, stages=4, parts=1) as pipe:
        value = pipe.evaluate(x, target=y)
    assert torch.equal(value, F.mse_loss(plain(x), y))
    assert differing(model, plain) == []


def test_micro_batches_of_other_recordings_have_their_own_ways():
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
