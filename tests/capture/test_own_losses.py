"""Models that compute their own loss: micro-batch losses add up to the mini-batch loss, or an error is raised."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart import Arguments, CaptureError, LossError
from pipepart.capture import RecordedChain, chain_of
from tests.support.recorded import assert_that_of_the_whole, own_loss, piped

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(-1, 3, (7,), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.loss(x, y)


class Criterion(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return entropy(x, y)


class Found(NamedTuple):
    logits: Tensor
    largest: Tensor
    loss: Tensor


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, ignore_index=-1)


RIGHT: dict[str, Callable[..., Any]] = {
    "a scalar": entropy,
    "a tuple with the loss at its end": lambda x, y: (x, entropy(x, y)),
    "a tuple that begins with the loss": lambda x, y: (entropy(x, y), x.detach().max()),
    "a named tuple": lambda x, y: Found(x, x.detach().max(), entropy(x, y)),
    "a dict": lambda x, y: {"loss": entropy(x, y), "logits": x},
    "a loss module of torch": nn.CrossEntropyLoss(ignore_index=-1),
    "a loss module": Criterion(),
    "two terms": lambda x, y: entropy(x, y) + 0.1 * x.square().mean(),
    "a sum": lambda x, y: x.square().sum(),
    "a view of computed size": lambda x, y: x.view(x.shape[0] * 2, 3).logsumexp(1).mean(),
    "a sum and a count": lambda x, y: (x.square().sum(1) * (y >= 0)).sum() / (y >= 0).sum(),
    "one value of each sample, picked on a device": lambda x, y: x[
        torch.arange(len(x), device=x.device), y.clamp(min=0)
    ].mean(),
    "one value of each sample": lambda x, y: x[torch.arange(x.shape[0]), y.clamp(min=0)].square().mean(),
    "a mask in the dtype of the samples": lambda x, y: (x.square() * (y >= 0).to(x)[:, None]).mean(),
    "a count in the dtype of the samples": lambda x, y: (x * (y >= 0)[:, None]).sum() / (y >= 0).sum().to(x),
    "divided by a number of elements": lambda x, y: x.square().sum() / x.numel(),
    "divided by a length": lambda x, y: x.square().sum() / len(y),
    "divided by a float of the number of samples": lambda x, y: x.square().sum() / float(x.shape[0]),
}
REFUSED: dict[str, Callable[..., Any]] = {
    "divided by what was computed from sizes": lambda x, y: x.square().sum() / (x.size(0) * 6 + 1),
    "divided by their number up to a limit": lambda x, y: x.square().sum() / min(len(x), 3),
    "divided by what math makes of it": lambda x, y: x.square().mean() / math.log(x.shape[0] + 1),
    "a tensor of it": lambda x, y: x.square().sum() / torch.tensor(float(len(x))),
    "samples taken one by one": lambda x, y: torch.stack([x[i].sum() for i in range(len(x))]).mean(),
    "a view across samples": lambda x, y: x.reshape(6, x.shape[0]).logsumexp(1).mean(),
    "divided by a value that is read": lambda x, y: x.square().sum() / (y >= 0).sum().item(),
    "computes with numbers of samples": lambda x, y: (x[:, 0] * torch.arange(len(x))).mean(),
    "picks other samples": lambda x, y: x[torch.arange(x.shape[0] - 1, -1, -1), 0].mean(),
    "a product of means": lambda x, y: x.mean() * x.square().mean(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_add_up_to_that_of_the_mini_batch(name):
    torch.manual_seed(0)
    model = Model(RIGHT[name]).double()
    plain = copy.deepcopy(model)
    with piped(model, (X, Y), parts=3) as pipe:
        loss = pipe.step(X, Y)
    expected = plain(X, Y)
    if isinstance(expected, tuple):
        expected = next(one for one in expected if one.requires_grad and not one.dim())
    else:
        expected = own_loss(expected)
    assert_that_of_the_whole(model, plain, loss, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", RIGHT)
def test_are_recorded_with_fake_parameters_as_well(name):
    """Two recordings, which are compared, as in a process that has some of the layers."""
    chain = chain_of(Model(RIGHT[name]).double())
    assert isinstance(chain, RecordedChain)
    chain.use_fake_parameters()
    calls = chain.bind_all([((X[:3], Y[:3]), {}), ((X[3:5], Y[3:5]), {})])
    assert all(call.live.recording.loss is not None for call in calls)


@pytest.mark.parametrize("samples", [6, 7])  # in micro-batches of equal and of unequal sizes
@pytest.mark.parametrize("name", REFUSED)
def test_are_refused(name, samples):
    model, given = Model(REFUSED[name]).double(), (X[:samples], Y[:samples])
    with (
        piped(model, given, parts=3) as pipe,
        pytest.raises(LossError, match="the loss that the model computes"),
    ):
        pipe.step(Arguments(*given))


def test_a_loss_may_read_sizes_of_sequences_of_any_length():
    model = Model(lambda x, y: ((x - y) ** 2).sum() / x.numel()).double()
    plain = copy.deepcopy(model)
    with piped(model, (torch.zeros(6, 7, 6).double(),) * 2, parts=3) as pipe:
        for length in (7, 5, 9, 7):
            x, y = torch.randn(2, 6, length, 6).double()
            expected = plain(x, y)
            torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-12, atol=0)


def test_a_loss_that_counts_samples_at_some_lengths_only_is_refused_there():
    model = Model(lambda x, y: ((x - y) ** 2).sum() / max(len(x), x.shape[1])).double()
    plain = copy.deepcopy(model)
    with piped(model, (torch.zeros(6, 7, 6).double(),) * 2, parts=3) as pipe:
        x, y = torch.randn(2, 6, 7, 6).double()
        torch.testing.assert_close(pipe.step(x, y), plain(x, y).detach(), rtol=1e-12, atol=0)
        with pytest.raises(LossError, match="the number of samples"):
            pipe.step(x[:, :3], y[:, :3])


def test_several_scalars_in_a_tuple_are_refused_as_none_is_named_the_loss():
    model = Model(lambda x, y: (x, x.mean(), entropy(x, y))).double()
    with (
        piped(model, (X, Y), parts=3) as pipe,
        pytest.raises(LossError, match="'loss' in a dict or an object"),
    ):
        pipe.step(X, Y)


class Logs(Model):
    """Returns numbers beside its loss, as for a log."""

    def __init__(self) -> None:
        super().__init__(nn.CrossEntropyLoss(ignore_index=-1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = self.loss(x, y)
        right, value = int((x.argmax(1) == y).sum()), loss.item()
        return {"loss": loss, "value": value, "again": value, "right": right, "text": "a"}


def test_numbers_for_a_log_are_those_of_each_micro_batch():
    model = Logs().double()
    plain = copy.deepcopy(model)
    with piped(model, (X, Y), stages=3, parts=3, merge=list) as pipe:
        loss, outputs = pipe.step(X, Y, return_outputs=True)
    assert_that_of_the_whole(model, plain, loss, plain(X, Y)["loss"], rtol=1e-12, atol=1e-12)
    parts = [plain(x, y) for x, y in zip(X.split([3, 2, 2]), Y.split([3, 2, 2]), strict=True)]
    for name in ("value", "again"):
        assert [one[name] for one in outputs] == pytest.approx([one["value"] for one in parts])
    assert [one["right"] for one in outputs] == [one["right"] for one in parts]


def test_a_number_is_not_returned_if_something_was_computed_with_it():
    class Returns(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return {"loss": F.cross_entropy(x, y), "right": (x.argmax(1) == y).sum().item() / 7}

    with pytest.raises(CaptureError, match=r"item\(\) at .* reads a value that modules compute"):
        piped(Returns(nn.Identity()).double(), (X, Y.clamp(min=0)))
