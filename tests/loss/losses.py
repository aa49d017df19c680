"""Losses of many kinds with a batch for each: those that add up over samples, and those that do not."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loss.batches import CLASSES, classes, images, numbers, square, tokens, weighted, wide

Loss = Callable[[Any, Any], Any]
Batch = Callable[[], tuple[Any, Any]]

CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 0.0, 2.0], dtype=torch.double)
BUFFER = torch.ones(3, dtype=torch.double)
WRITTEN = torch.ones(3, dtype=torch.double)
CENTERS = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(2)).double()
COUNT = torch.tensor(7.0, dtype=torch.double)
GLOBAL = {"scale": 0.5}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)
PENALIZED = nn.Parameter(torch.rand(2, 3, generator=torch.Generator().manual_seed(3)).double())
NOTES: list[float] = []


def written_before(o: Tensor, t: Tensor) -> Tensor:
    weights = torch.zeros(3, dtype=o.dtype)
    weights[1] = 2.0
    return F.mse_loss((o - t) * weights, t)


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


def head_sum(o: Tensor, t: Tensor) -> Tensor:
    loss = torch.tensor(0.0, dtype=torch.double)
    for i in range(3):
        loss += (i + 1) * F.mse_loss(o[:, i], t[:, i])
    return loss / 3


def vae(o: Tensor, t: Tensor) -> Tensor:
    mean, log_variance = o[:, :1], o[:, 1:2]
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.mse_loss(o, t, reduction="sum") / o.size(0) + kl / o.size(0)


def counted(o: Tensor, t: Tensor) -> Tensor:
    """Reads the number of samples, and divides by a constant that may equal it."""
    rows = F.mse_loss(o, t, reduction="none").sum(1)
    return (rows.sum() / len(o) + rows.mean()) / 2 + F.l1_loss(o, t, reduction="sum") / 2


class Attentive(nn.Module):
    """Learned weights of numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return ((o - t).square() * self.weight.softmax(0)).sum(1).mean()


def shifted(o: Tensor, t: Tensor) -> Tensor:
    logits, labels = o[:, :-1].contiguous(), t[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def picked(o: Tensor, t: Tensor) -> Tensor:
    mask = t != -100
    return F.cross_entropy(o[mask], t[mask]) + 0.1 * o.pow(2).mean()


def by_position(o: Tensor, t: Tensor) -> Tensor:
    losses = [F.cross_entropy(o[:, i], t[:, i], reduction="sum") for i in range(5)]
    return sum(losses[1:], losses[0]) / (t != -100).sum()


def confident(o: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(o, t, reduction="none")
    return losses[o.softmax(1).max(1).values > 0.4].mean()


def dice_over_images(o: Tensor, t: Tensor) -> Tensor:
    p = o.softmax(1)
    y = F.one_hot(t.clamp(min=0), num_classes=CLASSES).permute(0, 3, 1, 2).double()
    overlap, sizes = (p * y).sum((2, 3)), p.sum((2, 3)) + y.sum((2, 3))
    return 1 - (2 * overlap / sizes).mean()


# Numbers that are in proportion to the samples, and counts.
SIZES: list[Loss] = [
    *(lambda o, t: o.shape[0], lambda o, t: o.size(0), lambda o, t: o.numel(), lambda o, t: len(o)),
    *(lambda o, t: o.shape.numel(), lambda o, t: math.prod(o.shape), lambda o, t: float(np.prod(o.shape))),
    *(lambda o, t: 2 * len(t), lambda o, t: torch.clamp((t > 0).double().sum(), 1.0)),
    *(lambda o, t: (t > 0).sum().clamp(min=1), lambda o, t: (o.shape + (1,))[0]),  # noqa: RUF005
    *(lambda o, t: 2 * (t > 0).sum().clamp(min=50), lambda o, t: (t > 0).sum().clamp(min=7) * o.shape[1]),
    *(lambda o, t: (t > 0).long().sum().long(), lambda o, t: (-t.square()).sum()),
    lambda o, t: (-t.square()).sum().clamp(min=-9),
]

EXACT: dict[Batch, list[Loss]] = {
    numbers: [
        lambda o, t: torch.mean(torch.sum((o - t) ** 2, dim=-1), dim=0),
        lambda o, t: 0.5 * F.mse_loss(o, t) + 1.0,
        lambda o, t: F.mse_loss(o, t) * 2 - F.l1_loss(o, t) / 3,
        lambda o, t: 1 - F.mse_loss(o, t).mul(2).double() - t.sum(),
        lambda o, t: F.mse_loss(o, t) - F.l1_loss(o, t).detach(),
        lambda o, t: 0.5 * F.mse_loss(torch.tensor(0.5) * o * torch.tensor([1.0, 2.0, 3.0]), t),
        lambda o, t: torch.sqrt((o - t) ** 2 + 1e-6).mean(),
        lambda o, t: (o - t).norm(dim=1).mean(),
        lambda o, t: (1 - F.cosine_similarity(o, t)).mean(),
        lambda o, t: F.mse_loss(F.normalize(o), t),
        lambda o, t: F.mse_loss(o[t > 0], t[t > 0]),
        lambda o, t: F.mse_loss(o.T, t.T) + F.mse_loss(o[None, :, 1], t[None, :, 1]),
        lambda o, t: F.mse_loss(o.flatten(), t.reshape(-1).view_as(o.flatten())),
        lambda o, t: torch.where(t > 0, (o - t) ** 2, (o - t).abs()).mean(),
        lambda o, t: (o.pow(2) * (t > 0)).sum() / (t > 0).sum(),
        lambda o, t: (o.cumsum(1) - t.cumsum(1)).abs().mean() + o.std(1).mean(),
        lambda o, t: 3 * (o.pow(2) * (o > 0)).sum() / (0.5 * (o > 0).double().sum()),
        lambda o, t: F.l1_loss(o, t, reduction="sum") / t.abs().sum() + 1,
        lambda o, t: F.kl_div(F.log_softmax(o / 2, -1), F.softmax(t / 2, -1), reduction="batchmean") * 4,
        lambda o, t: (WEIGHTS * (o - t).square()).sum() / WEIGHTS.sum() / len(o),
        lambda o, t: (F.mse_loss(o, t, reduction="sum") - o[:, 1].exp().sum() / 2) / len(o),
        lambda o, t: (o[:, 1:] - o[:, :-1]).square().mean(),
        lambda o, t: F.pad(o - t, (1, 1)).square().mean(),
        lambda o, t: F.mse_loss(o, t) + 0.1 * (PENALIZED.square().sum() + PENALIZED.norm()),
        lambda o, t: F.mse_loss(o * BUFFER, t) * GLOBAL["scale"],
        lambda o, t: (o * (t > 0)).sum() / (t > 0).sum() + (o.abs() * (t < 0)).sum() / (t < 0).sum(),
        lambda o, t: (o * (t > 9)).sum() / (t > 9).sum().clamp(min=1) + o.abs().mean(),
        lambda o, t: ((o * (t > 0)).sum(), (t > 0).sum()),
        lambda o, t: ((o * (o > 0)).sum(), (o > 0).sum()),
        lambda o, t: ((o * (t > 0)).sum(), (t > 0).sum().clamp(min=50)),
        lambda o, t: ((o - t).square().sum(), o.numel()),
        lambda o, t: ((o * t.relu_().clone()).sum(), t.sum()),
        lambda o, t: F.binary_cross_entropy_with_logits(o, torch.ones_like(o)),
        lambda o, t: F.mse_loss(o, t) * torch.tensor(0.5),
        lambda o, t: (o - t).square().sum() / COUNT.to(o.device) - o.abs().mean() / COUNT,
        lambda o, t: o.clone().sub_(t).square().mean(),
        lambda o, t: (o - t).square().sum() + 2 * o.abs().sum().detach(),
        lambda o, t: ((o - t).square() * (o - t).abs().detach().exp()).mean(),
        *(aliased, doubled_before_more_is_added, written_before, head_sum, vae, counted, Attentive()),
        *(lambda o, t, n=n: F.mse_loss(o, t, reduction="sum") / n(o, t) for n in SIZES),
    ],
    classes: [
        lambda o, t: -o.log_softmax(-1).gather(1, t[:, None]).mean(),
        lambda o, t: -(F.one_hot(t, num_classes=CLASSES) * o.log_softmax(-1)).sum(-1).mean(),
        lambda o, t: F.cross_entropy(o, torch.where(t == 0, -100, t)),
        lambda o, t: F.cross_entropy(o, t, ignore_index=1, label_smoothing=0.2),
        lambda o, t: 2 * F.cross_entropy(o, t, CLASS_WEIGHTS),
        lambda o, t: 2 * F.cross_entropy(o, t, CLASS_WEIGHTS, label_smoothing=0.1),
        lambda o, t: (F.cross_entropy(o, t, reduction="none") * CLASS_WEIGHTS[t]).sum() / CLASS_WEIGHTS[t].sum(),
        lambda o, t: o.abs().mean() + F.cross_entropy(o, t, CLASS_WEIGHTS, label_smoothing=0.1).detach(),
        lambda o, t: ((1 - (-F.cross_entropy(o, t, reduction="none")).exp()) ** 2).mean(),
        lambda o, t: (o - CENTERS[t]).square().mean(),
        lambda o, t: -o.log_softmax(1)[torch.arange(len(o)), t].mean(),
        confident,
    ],
    tokens: [
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), label_smoothing=0.1),
        lambda o, t: F.cross_entropy(o.flatten(0, 1).unflatten(0, (-1, 5)).mT, t),
        lambda o, t: F.cross_entropy(o.mT, t, reduction="none")[t != -100].mean(),
        lambda o, t: -o.log_softmax(-1).take_along_dim(t.clamp(0)[..., None], -1).mean(),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()) + 1e-3 * o.logsumexp(-1).pow(2).mean(),
        lambda o, t: o.logsumexp(-1)[o[..., 0] > 0].pow(2).mean(),
        lambda o, t: (F.cross_entropy(o.mT, t, reduction="none").sum(1) / (t != -100).sum(1).clamp(1)).mean(),
        lambda o, t: F.cross_entropy(o.view(o.shape[0] * o.shape[1], o.shape[2]), t.view(t.numel())),
        lambda o, t: F.cross_entropy(o.mT, t) + 2 * (F.mse_loss(o, o * 0) - PENALIZED.abs().sum()),
        lambda o, t: (F.cross_entropy(o.mT, t, reduction="sum"), (t != -100).sum().clamp(min=1)),
        lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten(), reduction="sum") / t.numel(),
        lambda o, t: F.cross_entropy(o.mT, t) - 0.5 * F.cross_entropy(2 * o.mT, t).detach(),
        lambda o, t: o.abs().mean() + (F.cross_entropy(o.mT, t) + o.square().mean()).detach(),
        lambda o, t: F.cross_entropy(o.mT, t).mean(),
        *(shifted, picked, by_position),
    ],
    images: [lambda o, t: F.cross_entropy(o, t, ignore_index=-1), dice_over_images],
    weighted: [
        lambda o, t: ((o - t[0]).square().mean(1) * t[1]).mean(),
        lambda o, t: ((o - t[0]).square().mean(1) * t[1]).sum(),
        lambda o, t: ((o - t[0]).square().mean(1) * t[1]).sum() / t[1].sum(),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t[0].sigmoid(), weight=t[1][:, None]),
    ],
    square: [lambda o, t: (o.T - t.T).square().mean() + (o + o.mT.mT).mean()],
    wide: [lambda o, t: F.mse_loss(o.split(4, 1)[0], t.split(4, dim=1)[1])],
}  # fmt: skip


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
        lambda o, t: F.mse_loss(Mixing.apply(o), t),
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
