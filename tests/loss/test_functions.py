"""User-written losses are exact if they add up over samples; for others, an error says what to write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart.loss import LossError
from tests.loss import by_parts
from tests.loss.batches import CLASSES, classes, numbers, tokens

Loss = Callable[[Tensor, Tensor], Any]


def shifted(o: Tensor, t: Tensor) -> Tensor:
    logits, labels = o[:, :-1].contiguous(), t[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def with_penalty(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.reshape(-1, o.shape[-1]), t.reshape(-1)) + 1e-3 * o.logsumexp(-1).pow(2).mean()


def picked(o: Tensor, t: Tensor) -> Tensor:
    mask = t != -100
    return F.cross_entropy(o[mask], t[mask]) + 0.1 * o.pow(2).mean()


def rows_of_more_than_half(o: Tensor, t: Tensor) -> Tensor:
    return o.logsumexp(-1)[o[..., 0] > 0].pow(2).mean()


def aliased(o: Tensor, t: Tensor) -> Tensor:
    first = F.mse_loss(o, t)
    total = first
    total += o.abs().mean()
    return total + first


def doubled_before_more_is_added(o: Tensor, t: Tensor) -> Tensor:
    first = F.mse_loss(o, t)
    doubled = 2 * first
    first += o.abs().mean()
    return doubled


def written_before(o: Tensor, t: Tensor) -> Tensor:
    weights = torch.zeros(3, dtype=o.dtype)
    weights[1] = 2.0
    return F.mse_loss((o - t) * weights, t)


def confident(o: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(o, t, reduction="none")
    return losses[o.softmax(1).max(1).values > 0.4].mean()


def distilled(o: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(o / 2, -1), F.softmax(t / 2, -1), reduction="batchmean") * 4


NOTES: list[float] = []


EXACT: list[tuple[Loss, Callable[[], Any]]] = [
    (lambda o, t: ((o - t) ** 2).mean(), numbers),
    (lambda o, t: torch.mean(torch.sum((o - t) ** 2, dim=-1), dim=0), numbers),
    (lambda o, t: 0.5 * F.mse_loss(o, t) + 1.0, numbers),
    (lambda o, t: F.mse_loss(o, t) * 2 - F.l1_loss(o, t) / 3, numbers),
    (lambda o, t: 1 - F.mse_loss(o, t).mul(2).double() - t.sum(), numbers),
    (lambda o, t: F.mse_loss(o, t) - F.l1_loss(o, t).detach(), numbers),
    (lambda o, t: 0.5 * F.mse_loss(torch.tensor(0.5) * o * torch.tensor([1.0, 2.0, 3.0]), t), numbers),
    (lambda o, t: torch.sqrt((o - t) ** 2 + 1e-6).mean(), numbers),
    (lambda o, t: (o - t).norm(dim=1).mean(), numbers),
    (lambda o, t: (1 - F.cosine_similarity(o, t)).mean(), numbers),
    (lambda o, t: F.mse_loss(F.normalize(o), t), numbers),
    (lambda o, t: F.mse_loss(o[t > 0], t[t > 0]), numbers),
    (lambda o, t: F.mse_loss(o.T, t.T) + F.mse_loss(o[None, :, 1], t[None, :, 1]), numbers),
    (lambda o, t: F.mse_loss(o.flatten(), t.reshape(-1).view_as(o.flatten())), numbers),
    (lambda o, t: torch.where(t > 0, (o - t) ** 2, (o - t).abs()).mean(), numbers),
    (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), label_smoothing=0.1), tokens),
    (lambda o, t: F.cross_entropy(o.flatten(0, 1).unflatten(0, (-1, 5)).mT, t), tokens),
    (lambda o, t: F.cross_entropy(o.mT, t, reduction="none")[t != -100].mean(), tokens),
    (lambda o, t: (o.pow(2) * (t > 0)).sum() / (t > 0).sum(), numbers),
    (lambda o, t: (o.cumsum(1) - t.cumsum(1)).abs().mean() + o.std(1).mean(), numbers),
    (lambda o, t: -o.log_softmax(-1).gather(1, t[:, None]).mean(), classes),
    (lambda o, t: -o.log_softmax(-1).take_along_dim(t.clamp(0)[..., None], -1).mean(), tokens),
    (lambda o, t: -(F.one_hot(t, num_classes=CLASSES) * o.log_softmax(-1)).sum(-1).mean(), classes),
    (lambda o, t: 3 * (o.pow(2) * (o > 0)).sum() / (0.5 * (o > 0).double().sum()), numbers),
    (lambda o, t: F.l1_loss(o, t, reduction="sum") / t.abs().sum() + 1, numbers),
    *((loss, tokens) for loss in (shifted, with_penalty, picked, rows_of_more_than_half)),
    *((loss, numbers) for loss in (aliased, doubled_before_more_is_added, written_before)),
    (distilled, numbers),
    (confident, classes),
]


@pytest.mark.parametrize("micro_batches", [3, 4, 6])
@pytest.mark.parametrize("case", range(len(EXACT)))
def test_what_adds_up_is_exact(case, micro_batches):
    loss_fn, batch = EXACT[case]
    x, y = batch()
    by_parts.check(loss_fn, x, y, micro_batches)


class Mixing(torch.autograd.Function):
    """Leaves values as they are, and mixes the gradients of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


class Counting:
    """Weighs each call by the number of calls so far."""

    calls = 0

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(o, t) * self.calls


class Averaging:
    """Divides by a running mean of its values."""

    mean = torch.ones(())

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        loss = F.mse_loss(o, t)
        found, self.mean = loss / self.mean, 0.9 * self.mean + 0.1 * loss.detach()
        return found


def read_first(o: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(o, t)
    NOTES.append(loss.item())
    return loss * 2


def detached_ratio(o: Tensor, t: Tensor) -> Tensor:
    a, b = F.mse_loss(o, t), o.abs().mean()
    return a + b * (a.detach() / b.detach())


def loop(o: Tensor, t: Tensor) -> Tensor:
    total = o.new_zeros(())
    for _ in range(o.shape[0]):
        total = total + F.mse_loss(o, t)
    return total


def written_behind_its_graph(o: Tensor, t: Tensor) -> Tensor:
    copy = o.clone()
    data = copy.data
    data.sub_(data.mean(0))
    return F.mse_loss(copy, t)


def written_through_a_view(o: Tensor, t: Tensor) -> Tensor:
    copy = o.clone()
    copy[:1].zero_()
    return F.mse_loss(copy, t)


def written_into_a_constant(o: Tensor, t: Tensor) -> Tensor:
    torch.mean(t, 0, out=BUFFER)
    return F.mse_loss(o * BUFFER, t)


BUFFER = torch.ones(3, dtype=torch.double)
SCALE = nn.Parameter(torch.zeros((), dtype=torch.double))


@torch.jit.script
def centred(t: Tensor) -> Tensor:
    return t - t.mean(0)


def hooked(o: Tensor, t: Tensor) -> Tensor:
    o.register_hook(lambda gradient: gradient / gradient.norm())
    return F.mse_loss(o, t)


def hooked_at_the_end(o: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(o, t)
    loss.register_hook(lambda gradient: 2 * gradient)
    return loss


# Numbers that look like those in proportion to the samples, or differ from those of the whole.
DIVISORS: list[Callable[[Tensor, Tensor], Any]] = [
    *(lambda o, t: torch.tensor(o.shape[0]), lambda o, t: o.shape[0] + 1, lambda o, t: o.shape[0] ** 2),
    *(lambda o, t: (t > 0).nonzero().shape[0], lambda o, t: len(t.unique()), lambda o, t: o[t > 0].shape[0]),
    *(lambda o, t: (o - t).square().sum().clamp(min=1), lambda o, t: (t > 0).sum().clamp(max=5)),
]


REFUSED: list[tuple[Loss, Callable[[], Any]]] = [
    (lambda o, t: F.mse_loss(o, t).log(), numbers),
    (lambda o, t: F.cross_entropy(o, t).exp(), classes),
    (lambda o, t: (o - t).abs().max(), numbers),
    (lambda o, t: F.mse_loss(o / o.std(), t), numbers),
    (lambda o, t: F.mse_loss(o - o.mean(0), t), numbers),
    (lambda o, t: F.mse_loss(o.softmax(0), t), numbers),
    (lambda o, t: F.mse_loss(o.cumsum(0), t), numbers),
    (lambda o, t: F.mse_loss(o, t[torch.randperm(len(t))]), numbers),
    (lambda o, t: F.mse_loss(o + torch.randn(()), t), numbers),
    (lambda o, t: ((o.T @ t) / o.shape[0] - torch.eye(3)).pow(2).sum(), numbers),
    (lambda o, t: torch.cdist(o, t).mean(), numbers),
    (lambda o, t: F.interpolate(o.T[None], size=2).square().mean(), numbers),
    (lambda o, t: F.mse_loss(o, t) * o.abs().mean(), numbers),
    (lambda o, t: F.mse_loss(o, t) / F.mse_loss(o, t).detach(), numbers),
    *((lambda o, t, n=n: F.mse_loss(o, t, reduction="sum") / n(o, t), numbers) for n in DIVISORS),
    (lambda o, t: F.mse_loss(o / o.size(0), t), numbers),
    (lambda o, t: F.mse_loss(o, torch.arange(o.shape[0]).double()[:, None].expand(-1, 3)), numbers),
    (lambda o, t: F.mse_loss(o.reshape(3, -1).softmax(1), t.reshape(3, -1)), numbers),
    (lambda o, t: F.mse_loss(o.reshape(1, -1).softmax(1), t.reshape(1, -1)), numbers),
    (lambda o, t: F.mse_loss(o.flatten().softmax(0), t.flatten()), numbers),
    (lambda o, t: F.mse_loss(o[:3], t[:3]), numbers),
    (lambda o, t: F.mse_loss(o[:, None] - o[None], t[:, None] - t[None]), numbers),
    (lambda o, t: F.mse_loss(o, t) + torch.where(t > 0)[0].double().mean(), numbers),
    (lambda o, t: F.mse_loss(o, centred(t)), numbers),
    (lambda o, t: F.mse_loss(o, torch.vmap(lambda c: c - c.mean(), 1, 1)(t)), numbers),
    (lambda o, t: F.mse_loss(o * t.mean(), t), numbers),
    (lambda o, t: F.mse_loss(o, t) * F.l1_loss(o, t).detach(), numbers),
    (lambda o, t: torch.add(F.mse_loss(o, t), F.l1_loss(o, t), alpha=2), numbers),
    (lambda o, t: (F.mse_loss(o, t) * torch.ones(3)).sum(), numbers),
    (lambda o, t: F.mse_loss(o, t) * torch.exp(-SCALE) + SCALE, numbers),
    (lambda o, t: (o.pow(2) * (t > 0)).sum() / (o.abs() * (t > 0)).sum(), numbers),
    (lambda o, t: (o.pow(2) * (t > 0)).sum() / ((t > 0).sum() + 1), numbers),
    (lambda o, t: o.gather(0, t[:, None].clamp(max=0)).mean(), classes),
    (lambda o, t: o.gather(1, torch.tensor([[0, 1]])).mean(), numbers),
    (lambda o, t: o.mean() + F.one_hot(t).double().mean(), classes),
    (lambda o, t: (o.pow(2).sum() + 1) / (t > 0).sum(), numbers),
    (lambda o, t: F.mse_loss(o, t) / (t > 0).sum(), numbers),
    (lambda o, t: F.cross_entropy(o.reshape(-1, CLASSES), t.T.reshape(-1)), tokens),
    (lambda o, t: F.cross_entropy(o.transpose(0, 1).reshape(-1, CLASSES), t.reshape(-1)), tokens),
    (lambda o, t: F.cross_entropy(o, t, ignore_index=int(t[0])), classes),
    (lambda o, t: F.mse_loss(o, t) * float(t.numpy().max()), numbers),
    (lambda o, t: torch.vmap(lambda a, b: (a - b).pow(2).sum())(o, t).mean(), numbers),
    (lambda o, t: F.mse_loss(Mixing.apply(o), t), numbers),
    (lambda o, t: F.cross_entropy(o, t, weight=1 / t.bincount(minlength=4).clamp(min=1).double()), classes),
    (lambda o, t: F.mse_loss(o, t).clamp(min=0.5), numbers),
    (
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t.sigmoid(), pos_weight=t.exp().sum() / t.abs().sum()
        ),
        numbers,
    ),
    *((loss, numbers) for loss in (read_first, detached_ratio, hooked, hooked_at_the_end, loop)),
    *(
        (loss, numbers)
        for loss in (written_behind_its_graph, written_through_a_view, written_into_a_constant)
    ),
    *((loss, numbers) for loss in (Counting(), Averaging())),
]


@pytest.mark.parametrize("micro_batches", [2, 6])
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_add_up_is_refused_with_the_choices(case, micro_batches):
    loss_fn, batch = REFUSED[case]
    x, y = batch()
    with pytest.raises(LossError, match="cannot be split into micro-batches") as caught:
        by_parts.check(loss_fn, x, y, micro_batches)
    assert 'reduction="batch"' in str(caught.value)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_one_micro_batch_is_exact_whatever_the_loss(case):
    loss_fn, batch = REFUSED[case]
    if isinstance(loss_fn, Counting | Averaging):
        pytest.skip("its value depends on earlier calls")
    torch.manual_seed(case)
    output, target = batch()
    ours, _ = (torch.manual_seed(1), by_parts.by_parts(loss_fn, output, target, 1))[1]
    theirs, _ = (torch.manual_seed(1), by_parts.whole(loss_fn, output, target))[1]
    torch.testing.assert_close(ours, theirs)


def test_a_constant_with_an_entry_for_each_sample_is_refused():
    weights = torch.ones(2, 1).double()
    with pytest.raises(LossError, match="pairs samples with entries of a constant"):
        by_parts.by_parts(lambda o, t: ((o - t) * weights).mean(), *numbers(), 3)


def test_a_loss_is_called_once_a_micro_batch_and_sees_real_values():
    calls: list[float] = []

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        loss = F.mse_loss(o, t)
        calls.append(loss.item())
        return loss

    output, target = numbers()
    by_parts.by_parts(loss_fn, output, target, 3)
    parts = zip(output.split(2), target.split(2), strict=True)
    assert calls == [F.mse_loss(a, b).item() for a, b in parts]
