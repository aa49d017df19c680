"""Random mini-batches of six samples, and losses that add up over samples: torch's, and a user's own."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4


def tokens() -> tuple[Tensor, Tensor]:
    """Logits and targets of sequences with unlike numbers of padded tokens; the first and last have nothing else."""
    y = torch.randint(CLASSES, (6, 5))
    y[0] = y[1, 2:] = y[5] = -100
    return torch.randn(6, 5, CLASSES).double(), y


def classes() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES).double(), torch.randint(CLASSES, (6,))


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3).double(), torch.randn(6, 3).double()


def weighted() -> tuple[Tensor, Any]:
    """Numbers, and a weight of each sample beside their targets."""
    o, t = numbers()
    return o, (t, torch.rand(6).double())


def square() -> tuple[Tensor, Tensor]:
    """Two samples a micro-batch of three, each with two numbers: extents that look alike."""
    return torch.randn(6, 2).double(), torch.randn(6, 2).double()


def wide() -> tuple[Tensor, Tensor]:
    """Eight samples of eight numbers."""
    return torch.randn(8, 8).double(), torch.randn(8, 8).double()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES, 4, 4).double(), torch.randint(-1, CLASSES, (6, 4, 4))


def some_ignored() -> tuple[Tensor, Tensor]:
    x, y = classes()
    return x, torch.where(torch.rand(6) < 0.5, -100, y)


def all_ignored() -> tuple[Tensor, Tensor]:
    return classes()[0], torch.full((6,), -100)


def log_probabilities() -> tuple[Tensor, Tensor]:
    x, y = some_ignored()
    return x.log_softmax(dim=1), y


def pixels() -> tuple[Tensor, Tensor]:
    x, y = images()
    return x, torch.where(y < 0, -100, y)


def class_probabilities() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES).double(), torch.randn(6, CLASSES).double().softmax(dim=1)


def distributions() -> tuple[Tensor, Tensor]:
    x, y = class_probabilities()
    return x.log_softmax(dim=1), y


def log_distributions() -> tuple[Tensor, Tensor]:
    x, y = distributions()
    return x, y.log()


def signs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3).double(), torch.randint(2, (6, 3)).double() * 2 - 1


def yes_or_no() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3).double(), torch.randint(2, (6, 3)).double()


def labels() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES).double(), torch.randint(-1, CLASSES, (6, CLASSES))


def pairs() -> tuple[tuple[Tensor, ...], Tensor]:
    """Two outputs of three numbers, and a sign."""
    return tuple(torch.randn(2, 6, 3).double()), torch.randint(2, (6,)).double() * 2 - 1


def triplets() -> tuple[tuple[Tensor, ...], None]:
    """Three outputs, and no target."""
    return tuple(torch.randn(3, 6, 3).double()), None


Loss = Callable[..., Any]
Batch = Callable[[], tuple[Any, Any]]

CLASS_WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 0.0], dtype=torch.double)
BUFFER = torch.ones(3, dtype=torch.double)
CENTERS = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(2)).double()
COUNT = torch.tensor(7.0, dtype=torch.double)
DISTANCES = nn.TripletMarginWithDistanceLoss(margin=0.5)
GLOBAL = {"scale": 0.5}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)
PENALIZED = nn.Parameter(torch.rand(2, 3, generator=torch.Generator().manual_seed(3)).double())


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
    pairs: [
        lambda o, t: F.cosine_embedding_loss(o[0], o[1], t, margin=0.2),
        lambda o, t: F.margin_ranking_loss(o[0][:, 0], o[1][:, 0], t),
        lambda o, t: F.gaussian_nll_loss(o[0], t[:, None], o[1].exp()),
    ],
    triplets: [lambda o: F.triplet_margin_loss(*o), lambda o: DISTANCES(*o)],
}  # fmt: skip

CRITERIA: dict[Batch, list[Loss]] = {
    some_ignored: [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.2),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    all_ignored: [nn.CrossEntropyLoss()],
    classes: [nn.CrossEntropyLoss(ignore_index=2), nn.MultiMarginLoss(weight=CLASS_WEIGHTS, p=2)],
    class_probabilities: [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    ],
    pixels: [nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1), nn.NLLLoss()],
    log_probabilities: [nn.NLLLoss(weight=CLASS_WEIGHTS)],
    numbers: [
        *(nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.L1Loss(), nn.SmoothL1Loss(beta=0.5)),
        *(nn.HuberLoss(), nn.PoissonNLLLoss()),
    ],
    yes_or_no: [
        nn.BCELoss(),
        nn.BCELoss(weight=torch.tensor([1.0, 0.0, 3.0], dtype=torch.double)),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)),
        nn.MultiLabelSoftMarginLoss(),
    ],
    distributions: [nn.KLDivLoss()],
    log_distributions: [nn.KLDivLoss(reduction="batchmean", log_target=True)],
    signs: [nn.HingeEmbeddingLoss(), nn.SoftMarginLoss()],
    labels: [nn.MultiLabelMarginLoss()],
}
