"""Losses of many kinds that are no sums over samples, or that change what another call reads, with a batch for each."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loss.exact_losses import (
    CENTERS,
    CLASSES,
    PENALIZED,
    Batch,
    Loss,
    classes,
    images,
    numbers,
    tokens,
    weighted,
    wide,
)
from tests.support.in_backward import with_gradient

WRITTEN = torch.ones(3, dtype=torch.double)
NOTES: list[float] = []


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


class Ema(nn.Module):
    """Keeps a mean in a buffer, from which it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3, dtype=torch.double))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * o.detach().mean(0))
        return F.mse_loss(o - self.mean, t)


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
    torch.mean(t, 0, out=WRITTEN)
    return F.mse_loss(o * WRITTEN, t)


def coefficient_written(o: Tensor, t: Tensor) -> Tensor:
    factor = torch.ones((), dtype=torch.double)
    loss = F.mse_loss(o, t) * factor
    factor.mul_(5)
    return loss + F.l1_loss(o, t) * factor


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


def in_place_labels(o: Tensor, t: Tensor) -> Tensor:
    t = t.clone()
    t[t == 0] = -100
    return F.cross_entropy(o, t)


def per_class(o: Tensor, t: Tensor) -> Tensor:
    total = o.sum() * 0
    for c in range(CLASSES):
        if (mask := t == c).any():
            total = total + F.cross_entropy(o[mask], t[mask])
    return total


def hard_negatives(o: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(o, t, reduction="none")
    return losses[losses > losses.mean()].mean()


# Numbers that look like those in proportion to the samples, or differ from those of the whole.
DIVISORS: list[Loss] = [
    *(lambda o, t: torch.tensor(o.shape[0]), lambda o, t: o.shape[0] + 1, lambda o, t: o.shape[0] ** 2),
    *(lambda o, t: (t > 0).nonzero().shape[0], lambda o, t: len(t.unique()), lambda o, t: o[t > 0].shape[0]),
    *(lambda o, t: (o - t).square().sum().clamp(min=1), lambda o, t: (t > 0).sum().clamp(max=5)),
    *(lambda o, t: -2 * (t > 0).sum().clamp(min=50), lambda o, t: (0.37 * (t > 0).sum()).to(torch.long)),
    *(lambda o, t: (50 * (t > 0).sum()).type(torch.int8), lambda o, t: (t > 0).sum() + 1e-8),
    *(lambda o, t: (t > 0).sum().clamp(min=50).clamp(min=1), lambda o, t: (o.abs() * (t > 0)).sum()),
    *(lambda o, t: (t > 0).sum().clamp(1, 5), lambda o, t: (t > 0).sum().clamp(min=1).clamp(max=5)),
    *(lambda o, t: max(len(o), 4), lambda o, t: min(len(o), 4), lambda o, t: (t > 0).sum().item()),
]

REFUSED: dict[Batch, list[Loss]] = {
    numbers: [
        lambda o, t: F.mse_loss(o, t).log(),
        lambda o, t: (o - t).abs().max(),
        lambda o, t: F.mse_loss(o / o.std(), t),
        lambda o, t: F.mse_loss(o - o.mean(0), t),
        lambda o, t: F.mse_loss(o.softmax(0), t),
        lambda o, t: F.mse_loss(o.cumsum(0), t),
        lambda o, t: F.mse_loss(o, t[torch.randperm(len(t))]),
        lambda o, t: F.mse_loss(o + torch.randn(()), t),
        lambda o, t: F.mse_loss(o * torch.rand_like(o), t),
        lambda o, t: F.mse_loss(F.dropout(o), t),
        lambda o, t: torch.cdist(o, t).mean(),
        lambda o, t: F.interpolate(o.T[None], size=2).square().mean(),
        lambda o, t: F.mse_loss(o, t) * o.abs().mean(),
        lambda o, t: F.mse_loss(o, t) / F.mse_loss(o, t).detach(),
        lambda o, t: F.mse_loss(o / o.size(0), t),
        lambda o, t: F.mse_loss(o, torch.arange(o.shape[0]).double()[:, None].expand(-1, 3)),
        lambda o, t: F.mse_loss(o.reshape(3, -1).softmax(1), t.reshape(3, -1)),
        lambda o, t: F.mse_loss(o.reshape(1, -1).softmax(1), t.reshape(1, -1)),
        lambda o, t: F.mse_loss(o.flatten().softmax(0), t.flatten()),
        lambda o, t: F.mse_loss(o[:3], t[:3]),
        lambda o, t: F.mse_loss(o[-1:], t[-1:]),
        lambda o, t: F.mse_loss(o[:100], t[:100]),
        lambda o, t: F.mse_loss(o[: len(o) // 2], t[: len(o) // 2]),
        lambda o, t: (o[1:] - o[:-1]).square().mean(),
        lambda o, t: F.mse_loss(o[:, None] - o[None], t[:, None] - t[None]),
        lambda o, t: F.mse_loss(o, t) + torch.where(t > 0)[0].double().mean(),
        lambda o, t: F.mse_loss(o, centred(t)),
        lambda o, t: F.mse_loss(o, torch.vmap(lambda c: c - c.mean(), 1, 1)(t)),
        lambda o, t: F.mse_loss(o * t.mean(), t),
        lambda o, t: F.mse_loss(o, t) * F.l1_loss(o, t).detach(),
        lambda o, t: torch.add(F.mse_loss(o, t), F.l1_loss(o, t), alpha=2),
        lambda o, t: (F.mse_loss(o, t) * torch.ones(3)).sum(),
        lambda o, t: F.mse_loss(o, t) * torch.exp(-PENALIZED.sum()) + PENALIZED.sum(),
        lambda o, t: o.gather(1, torch.tensor([[0, 1]])).mean(),
        lambda o, t: F.mse_loss(with_gradient(o, lambda g: g - g.mean(0)), t),
        lambda o, t: F.mse_loss(o, t).clamp(min=0.5),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid(), pos_weight=t.exp().sum() / t.abs().sum()),
        lambda o, t: F.mse_loss(o, t) if len(o) < 4 else F.l1_loss(o, t),
        lambda o, t: [F.mse_loss(o, t), F.l1_loss(o, t)][len(o) > 4],
        lambda o, t: torch.stack([F.mse_loss(o[:, i], t[:, i]) for i in range(3)]).mean(),
        lambda o, t: 1 - 2 * (o.sigmoid() * t.sigmoid()).sum() / (o.sigmoid() + t.sigmoid()).sum(),
        lambda o, t: 1 - (o * t).sum(0).div((o + t).sum(0)).mean(),
        lambda o, t: (o.sort(1).values - t.sort(1).values).square().mean(),
        lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))),
        lambda o, t: F.mse_loss(F.linear(o, CENTERS[:3, :3]), t),
        lambda o, t: F.mse_loss(o, o.roll(1, 0).detach()),
        lambda o, t: (o[:, :1] - t[:, 0]).square().mean(),
        lambda o, t: F.mse_loss(o[:, :1], t[:, 0]),
        lambda o, t: F.pad(o - t, (0, 0, 1, 0)).square().mean(),
        lambda o, t: (o - t).norm() / 3,
        lambda o, t: (o - t).logsumexp((0, 1)),
        lambda o, t: F.mse_loss(F.layer_norm(o.T, (len(o),)).T, t),
        lambda o, t: F.mse_loss(o, t) * (o.mean() > 0),
        lambda o, t: F.mse_loss(o, t) + (F.l1_loss(o, t) if F.mse_loss(o, t) > 0.5 else 0),
        lambda o, t: F.mse_loss(o, t) + (t > 9).sum().clamp(min=1),
        lambda o, t: F.binary_cross_entropy_with_logits(o, torch.ones(o.shape, dtype=o.dtype)),
        lambda o, t: (o[t[:, 0] > -99] - t).square().mean(),
        lambda o, t: (o.mean(1) * torch.linspace(0, 1, len(o)).double()).mean(),
        lambda o, t: (o.mean(1) * torch.tensor([1.0 + i for i in range(len(o))]).double()).mean(),
        lambda o, t: F.mse_loss(o, t) * len(o),
        lambda o, t: (F.mse_loss(o, t, reduction="none") * torch.from_numpy(np.random.rand(3))).mean(),
        lambda o, t: (F.mse_loss(o, t, reduction="none") * torch.tensor(np.random.rand(3))).mean(),
        lambda o, t: F.mse_loss(o, t) * (1 if o.shape != (6, 3) else 2),
        lambda o, t: F.mse_loss(o, t) * (1 if o.shape < (6, 3) else 2),
        lambda o, t: F.mse_loss(o, t) + torch.autograd.grad(o.square().sum(), o, create_graph=True)[0].norm(),
        lambda o, t: sum(F.mse_loss(a, b) for a, b in zip(o, t, strict=True)) / len(o),
        lambda o, t: F.mse_loss(o[:, [0, 2]], t[:, [0, 2]]),
        lambda o, t: F.mse_loss(o, torch.from_numpy(t.numpy() * 2)),
        *(read_first, detached_ratio, hooked, hooked_at_the_end, loop, coefficient_written),
        *(written_behind_its_graph, written_through_a_view, written_into_a_constant),
        *(Counting(), Averaging(), Ema()),
        *(lambda o, t, n=n: F.mse_loss(o, t, reduction="sum") / n(o, t) for n in DIVISORS),
    ],
    classes: [
        lambda o, t: F.cross_entropy(o, t).exp(),
        lambda o, t: o.gather(0, t[:, None].clamp(max=0)).mean(),
        lambda o, t: F.cross_entropy(o, t, weight=1 / t.bincount(minlength=4).clamp(min=1).double()),
        lambda o, t: F.cross_entropy(o, t, reduction="none").topk(1).values.mean(),
        lambda o, t: -o.log_softmax(1)[torch.arange(len(o)).flip(0), t].mean(),
        lambda o, t: F.cross_entropy(o, torch.zeros(len(o), dtype=torch.long)),
        *(in_place_labels, per_class, hard_negatives),
    ],
    tokens: [lambda o, t: F.cross_entropy(o.mT, t, reduction="sum") / int((t != -100).sum())],
    images: [
        lambda o, t: F.cross_entropy(F.interpolate(o, scale_factor=2.0), t.repeat(1, 2, 2).clamp(min=0)),
    ],
    weighted: [lambda o, t: (F.mse_loss(o, t[0], reduction="none").mean(1) * t[1] / t[1].sum()).sum()],
    wide: [
        lambda o, t: F.mse_loss(o[::2], t[::2]),
        lambda o, t: F.mse_loss(o[::5], t[::5]),
        lambda o, t: F.mse_loss(o.split(2)[0], t.split(2)[0]),
        lambda o, t: F.mse_loss(torch.chunk(o, 2, dim=0)[1], t.chunk(2)[1]),
    ],
}  # fmt: skip
