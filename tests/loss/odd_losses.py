"""Losses of many kinds, with a batch for each, and whether they are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.loss.batches import classes, numbers, tokens
from tests.loss.odd_functions import (
    BUFFER,
    CENTERS,
    CLASS_WEIGHTS,
    GLOBAL,
    PENALIZED,
    TOTAL,
    WEIGHTS,
    Attentive,
    Ema,
    Learned,
    accumulated,
    by_position,
    coefficient_written,
    dice_over_images,
    first_half,
    hard_negatives,
    head_sum,
    heads,
    images,
    in_place_labels,
    per_class,
    square,
    top,
    vae,
    weighted,
    wide,
)

Loss = Callable[[Any, Any], Any]
REFUSED = "refused"
LOSSES: dict[str, tuple[Loss, Callable[[], Any]] | tuple[Loss, Callable[[], Any], str]] = {
    "sample weights": (lambda o, t: ((o - t[0]).square().mean(1) * t[1]).mean(), weighted),
    "sample weights, summed": (lambda o, t: ((o - t[0]).square().mean(1) * t[1]).sum(), weighted),
    "sample weights, normalized": (
        lambda o, t: ((o - t[0]).square().mean(1) * t[1]).sum() / t[1].sum(),
        weighted,
    ),
    "sample weights times, mean over": (
        lambda o, t: (F.mse_loss(o, t[0], reduction="none").mean(1) * t[1] / t[1].sum()).sum(),
        weighted,
        REFUSED,
    ),
    "weights of a binary loss": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t[0].sigmoid(), weight=t[1][:, None]),
        weighted,
    ),
    "ignored": (in_place_labels, classes, REFUSED),
    "ignored by where": (lambda o, t: F.cross_entropy(o, torch.where(t == 0, -100, t)), classes),
    "ignored class": (lambda o, t: F.cross_entropy(o, t, ignore_index=1, label_smoothing=0.2), classes),
    "class weights": (lambda o, t: F.cross_entropy(o, t, CLASS_WEIGHTS), classes),
    "class weights, doubled": (lambda o, t: 2 * F.cross_entropy(o, t, CLASS_WEIGHTS), classes),
    "class weights, smoothed": (
        lambda o, t: 2 * F.cross_entropy(o, t, CLASS_WEIGHTS, label_smoothing=0.1),
        classes,
    ),
    "class weights by hand": (
        lambda o, t: (
            (F.cross_entropy(o, t, reduction="none") * CLASS_WEIGHTS[t]).sum() / CLASS_WEIGHTS[t].sum()
        ),
        classes,
    ),
    "tokens by hand": (
        lambda o, t: (F.cross_entropy(o.mT, t, reduction="none") * (t != -100)).sum() / (t != -100).sum(),
        tokens,
    ),
    "tokens, mean over sequences": (
        lambda o, t: (
            F.cross_entropy(o.mT, t, reduction="none").sum(1) / (t != -100).sum(1).clamp(min=1)
        ).mean(),
        tokens,
    ),
    "tokens, a count that is read": (
        lambda o, t: F.cross_entropy(o.mT, t, reduction="sum") / int((t != -100).sum()),
        tokens,
        REFUSED,
    ),
    "tokens, in a view of sizes": (
        lambda o, t: F.cross_entropy(o.view(o.shape[0] * o.shape[1], o.shape[2]), t.view(t.numel())),
        tokens,
    ),
    "a mean of means": (per_class, classes, REFUSED),
    "heads, stacked": (heads, numbers, REFUSED),
    "heads, added in place": (head_sum, numbers),
    "an autoencoder": (vae, numbers),
    "a sum that is divided twice": (
        lambda o, t: (WEIGHTS * (o - t).square()).sum() / WEIGHTS.sum() / len(o),
        numbers,
    ),
    "sums of two kinds, divided at the end": (
        lambda o, t: (F.mse_loss(o, t, reduction="sum") - o[:, 1].exp().sum() / 2) / len(o),
        numbers,
    ),
    "sums by position, divided at the end": (by_position, tokens),
    "focal": (lambda o, t: ((1 - (-F.cross_entropy(o, t, reduction="none")).exp()) ** 2).mean(), classes),
    "dice of images": (dice_over_images, images),
    "dice over the batch": (
        lambda o, t: 1 - 2 * (o.sigmoid() * t.sigmoid()).sum() / (o.sigmoid() + t.sigmoid()).sum(),
        numbers,
        REFUSED,
    ),
    "jaccard over the batch": (lambda o, t: 1 - (o * t).sum(0).div((o + t).sum(0)).mean(), numbers, REFUSED),
    "pixels": (lambda o, t: F.cross_entropy(o, t, ignore_index=-1), images),
    "pixels, interpolated": (
        lambda o, t: F.cross_entropy(F.interpolate(o, scale_factor=2.0), t.repeat(1, 2, 2).clamp(min=0)),
        images,
        REFUSED,
    ),
    "hard negatives": (hard_negatives, classes, REFUSED),
    "the largest": (top, classes, REFUSED),
    "a quantile": (lambda o, t: (o - t).abs().quantile(0.9), numbers, REFUSED),
    "sorted": (lambda o, t: (o.sort(0).values - t.sort(0).values).square().mean(), numbers, REFUSED),
    "sorted in each sample": (
        lambda o, t: (o.sort(1).values - t.sort(1).values).square().mean(),
        numbers,
        REFUSED,
    ),
    "covariance": (lambda o, t: (torch.cov(o.T) - torch.eye(3)).square().mean(), numbers, REFUSED),
    "correlation": (
        lambda o, t: ((o - o.mean(0)).T @ (o - o.mean(0))).square().mean() + F.mse_loss(o, t),
        numbers,
        REFUSED,
    ),
    "in-batch negatives": (lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))), numbers, REFUSED),
    "distances": (lambda o, t: F.pdist(o).mean(), numbers, REFUSED),
    "einsum over samples": (lambda o, t: torch.einsum("nc,mc->nm", o, t).mean(), numbers, REFUSED),
    "centers": (lambda o, t: (o - CENTERS[t]).square().mean(), classes),
    "linear in the loss": (lambda o, t: F.mse_loss(F.linear(o, CENTERS[:3, :3]), t), numbers, REFUSED),
    "rolled": (lambda o, t: F.mse_loss(o, o.roll(1, 0).detach()), numbers, REFUSED),
    "neighbours": (lambda o, t: (o[1:] - o[:-1]).square().mean(), numbers, REFUSED),
    "neighbours in a sample": (lambda o, t: (o[:, 1:] - o[:, :-1]).square().mean(), numbers),
    "every second": (lambda o, t: F.mse_loss(o[::2], t[::2]), wide, REFUSED),
    "every fifth": (lambda o, t: F.mse_loss(o[::5], t[::5]), wide, REFUSED),
    "the first half": (first_half, wide, REFUSED),
    "the last": (lambda o, t: F.mse_loss(o[-1:], t[-1:]), numbers, REFUSED),
    "a slice of all": (lambda o, t: F.mse_loss(o[:100], t[:100]), numbers, REFUSED),
    "pieces": (lambda o, t: F.mse_loss(o.split(2)[0], t.split(2)[0]), wide, REFUSED),
    "pieces of samples": (lambda o, t: F.mse_loss(o.split(4, 1)[0], t.split(4, dim=1)[1]), wide),
    "pieces by keyword": (lambda o, t: F.mse_loss(torch.chunk(o, 2, dim=0)[1], t.chunk(2)[1]), wide, REFUSED),
    "transposed square": (lambda o, t: (o.T - t.T).square().mean() + (o + o.mT.mT).mean(), square),
    "broadcast against each other": (lambda o, t: (o[:, :1] - t[:, 0]).square().mean(), numbers, REFUSED),
    "broadcast by torch": (lambda o, t: F.mse_loss(o[:, :1], t[:, 0]), numbers, REFUSED),
    "padded": (lambda o, t: F.pad(o - t, (1, 1)).square().mean(), numbers),
    "padded samples": (lambda o, t: F.pad(o - t, (0, 0, 1, 0)).square().mean(), numbers, REFUSED),
    "a norm of all": (lambda o, t: (o - t).norm() / 3, numbers, REFUSED),
    "the root of a mean": (lambda o, t: F.mse_loss(o, t).sqrt(), numbers, REFUSED),
    "the root of each": (lambda o, t: (o - t).square().mean(1).sqrt().mean(), numbers),
    "logsumexp of all": (lambda o, t: (o - t).logsumexp((0, 1)), numbers, REFUSED),
    "normalized by the batch": (lambda o, t: F.mse_loss(F.layer_norm(o.T, (len(o),)).T, t), numbers, REFUSED),
    "a running mean": (Ema(), numbers, REFUSED),
    "learned weights of terms": (Learned(), numbers, REFUSED),
    "a penalty of parameters": (
        lambda o, t: F.mse_loss(o, t) + 0.1 * (PENALIZED.square().sum() + PENALIZED.norm()),
        numbers,
    ),
    "a penalty beside counts": (
        lambda o, t: F.cross_entropy(o.mT, t) + 2 * (F.mse_loss(o, o * 0) - PENALIZED.abs().sum()),
        tokens,
    ),
    "a penalty that scales": (lambda o, t: F.mse_loss(o, t) * PENALIZED.square().sum(), numbers, REFUSED),
    "learned weights in samples": (Attentive(), numbers),
    "a number of a global": (lambda o, t: F.mse_loss(o, t) * GLOBAL["scale"], numbers),
    "a tensor of a global": (lambda o, t: F.mse_loss(o * BUFFER, t), numbers),
    "a coefficient that is written": (coefficient_written, numbers, REFUSED),
    "added up in place": (accumulated, numbers),
    "random": (lambda o, t: F.mse_loss(o * torch.rand_like(o), t), numbers, REFUSED),
    "dropout": (lambda o, t: F.mse_loss(F.dropout(o), t), numbers, REFUSED),
    "gated by a value": (lambda o, t: F.mse_loss(o, t) * (o.mean() > 0), numbers, REFUSED),
    "stopped by a value": (
        lambda o, t: F.mse_loss(o, t) + (F.l1_loss(o, t) if F.mse_loss(o, t) > 0.5 else 0),
        numbers,
        REFUSED,
    ),
    "two counts": (
        lambda o, t: (o * (t > 0)).sum() / (t > 0).sum() + (o.abs() * (t < 0)).sum() / (t < 0).sum(),
        numbers,
    ),
    "a count of zero samples": (
        lambda o, t: (o * (t > 9)).sum() / (t > 9).sum().clamp(min=1) + o.abs().mean(),
        numbers,
    ),
    "twice a count with a bound": (
        lambda o, t: (o - t).square().sum() / (2 * (t > 0).sum().clamp(min=50)),
        numbers,
    ),
    "a count with a bound times a size": (
        lambda o, t: (o - t).square().sum() / ((t > 0).sum().clamp(min=7) * o.shape[1]),
        numbers,
    ),
    "a count with a bound, negative": (
        lambda o, t: (o - t).square().sum() / (-2 * (t > 0).sum().clamp(min=50)),
        numbers,
        REFUSED,
    ),
    "a count that is rounded": (
        lambda o, t: o.abs().sum() / (0.37 * (t > 0).sum()).to(torch.long),
        numbers,
        REFUSED,
    ),
    "a count that overflows": (
        lambda o, t: o.abs().sum() / (50 * (t > 0).sum()).type(torch.int8),
        numbers,
        REFUSED,
    ),
    "a count of integers": (lambda o, t: o.abs().sum() / (t > 0).long().sum().long(), numbers),
    "a count that is negative": (lambda o, t: o.abs().sum() / (-t.square()).sum(), numbers),
    "a negative count with a bound": (
        lambda o, t: o.abs().sum() / (-t.square()).sum().clamp(min=-9),
        numbers,
    ),
    "a count with two bounds": (
        lambda o, t: (o - t).square().sum() / (t > 0).sum().clamp(min=50).clamp(min=1),
        numbers,
        REFUSED,
    ),
    "a count with a bound as a term": (
        lambda o, t: F.mse_loss(o, t) + (t > 9).sum().clamp(min=1),
        numbers,
        REFUSED,
    ),
    "a count with an epsilon": (lambda o, t: (o * (t > 0)).sum() / ((t > 0).sum() + 1e-8), numbers, REFUSED),
    "a pair": (lambda o, t: ((o * (t > 0)).sum(), (t > 0).sum()), numbers),
    "a pair of the output": (lambda o, t: ((o * (o > 0)).sum(), (o > 0).sum()), numbers),
    "a pair with a bound": (
        lambda o, t: (F.cross_entropy(o.mT, t, reduction="sum"), (t != -100).sum().clamp(min=1)),
        tokens,
    ),
    "a pair with a large bound": (lambda o, t: ((o * (t > 0)).sum(), (t > 0).sum().clamp(min=50)), numbers),
    "a pair with a number": (lambda o, t: ((o - t).square().sum(), o.numel()), numbers),
    "a pair with a written target": (lambda o, t: ((o * t.relu_().clone()).sum(), t.sum()), numbers),
    "samples times tokens": (
        lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten(), reduction="sum") / t.numel(),
        tokens,
    ),
    "one value of each sample": (lambda o, t: -o.log_softmax(1)[torch.arange(len(o)), t].mean(), classes),
    "the values in reverse": (
        lambda o, t: -o.log_softmax(1)[torch.arange(len(o)).flip(0), t].mean(),
        classes,
        REFUSED,
    ),
    "labels of one class": (
        lambda o, t: F.cross_entropy(o, torch.zeros(len(o), dtype=torch.long)),
        classes,
        REFUSED,
    ),
    "labels of ones": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, torch.ones(o.shape, dtype=o.dtype)),
        numbers,
        REFUSED,
    ),
    "labels of ones, like the output": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, torch.ones_like(o)),
        numbers,
    ),
    "a factor that is a tensor": (lambda o, t: F.mse_loss(o, t) * torch.tensor(0.5), numbers),
    "a divisor that is a tensor": (
        lambda o, t: (o - t).square().sum() / TOTAL.to(o.device) - o.abs().mean() / TOTAL,
        numbers,
    ),
    "a factor that is a tensor with a gradient": (
        lambda o, t: F.mse_loss(o, t) * PENALIZED.sum().exp(),
        numbers,
        REFUSED,
    ),
    "written in place": (lambda o, t: o.clone().sub_(t).square().mean(), numbers),
    "one sample against some": (lambda o, t: (o[t[:, 0] > -99] - t).square().mean(), numbers, REFUSED),
    "a ramp over samples": (
        lambda o, t: (o.mean(1) * torch.linspace(0, 1, len(o)).double()).mean(),
        numbers,
        REFUSED,
    ),
    "weights from a loop": (
        lambda o, t: (o.mean(1) * torch.tensor([1.0 + i for i in range(len(o))]).double()).mean(),
        numbers,
        REFUSED,
    ),
    "scaled by the number of samples": (lambda o, t: F.mse_loss(o, t) * len(o), numbers, REFUSED),
    "new constants of numpy": (
        lambda o, t: (F.mse_loss(o, t, reduction="none") * torch.from_numpy(np.random.rand(3))).mean(),
        numbers,
        REFUSED,
    ),
    "new tensors of arrays": (
        lambda o, t: (F.mse_loss(o, t, reduction="none") * torch.tensor(np.random.rand(3))).mean(),
        numbers,
        REFUSED,
    ),
    "an extent of a longer shape": (
        lambda o, t: (o - t).square().sum() / (o.shape + (1,))[0],  # noqa: RUF005
        numbers,
    ),
    "another shape than a number": (
        lambda o, t: F.mse_loss(o, t) * (1 if o.shape != (6, 3) else 2),
        numbers,
        REFUSED,
    ),
    "few samples": (lambda o, t: F.mse_loss(o, t) * (1 if o.shape < (6, 3) else 2), numbers, REFUSED),
    "a gradient penalty": (
        lambda o, t: F.mse_loss(o, t) + torch.autograd.grad(o.square().sum(), o, create_graph=True)[0].norm(),
        numbers,
        REFUSED,
    ),
    "samples in a loop": (
        lambda o, t: sum(F.mse_loss(a, b) for a, b in zip(o, t, strict=True)) / len(o),
        numbers,
        REFUSED,
    ),
    "a detached mean": (
        lambda o, t: F.cross_entropy(o.mT, t) - 0.5 * F.cross_entropy(2 * o.mT, t).detach(),
        tokens,
    ),
    "a detached sum": (lambda o, t: (o - t).square().sum() + 2 * o.abs().sum().detach(), numbers),
    "detached smoothed class weights": (
        lambda o, t: o.abs().mean() + F.cross_entropy(o, t, CLASS_WEIGHTS, label_smoothing=0.1).detach(),
        classes,
    ),
    "a detached sum of terms": (
        lambda o, t: o.abs().mean() + (F.cross_entropy(o.mT, t) + o.square().mean()).detach(),
        tokens,
    ),
    "the mean of a mean": (lambda o, t: F.cross_entropy(o.mT, t).mean(), tokens),
    "without a gradient in part": (
        lambda o, t: ((o - t).square() * (o - t).abs().detach().exp()).mean(),
        numbers,
    ),
    "columns by a list": (lambda o, t: F.mse_loss(o[:, [0, 2]], t[:, [0, 2]]), numbers, REFUSED),
    "numpy in between": (lambda o, t: F.mse_loss(o, torch.from_numpy(t.numpy() * 2)), numbers, REFUSED),
}
