"""Layers that use their input, parameters and buffers in ways that are difficult for a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.pieces import WIDTH, linear
from tests.support.two_parts import Calls


def double() -> Calls:
    """Writes over its input, and has no flag that says so."""
    return Calls(lambda x: x.mul_(2))


def halves(x: Tensor) -> Tensor:
    """Saves two views of one tensor, one of them with gaps, and the tensor itself."""
    y = x.sigmoid()
    return torch.cat([y[:, ::2] * y[:, 1::2], y.sin()], dim=1)


def slope(x: Tensor, inner: nn.Module) -> Tensor:
    """Differentiates in its forward."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(inner(x).tanh().sum(), x, create_graph=True)[0]


class Turned(nn.Linear):
    """Multiplies from the left, so that the gradient of its input is a transposed matrix."""

    def forward(self, input: Tensor) -> Tensor:
        return (self.weight @ input.t().contiguous()).t()


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _enlarge(module: nn.Module, coming: Any, going: Any) -> Any:
    return None if coming[0] is None else (coming[0] * 1.5,)


def _shrink(module: nn.Module, given: Any, output: Any) -> Any:
    return output * 0.75


def hooked() -> nn.Linear:
    """A layer with hooks of every kind, all of which change what they see."""
    layer = linear()
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))
    layer.register_forward_hook(_shrink)
    layer.register_full_backward_pre_hook(lambda module, going: (going[0] * 2,))
    layer.register_full_backward_hook(_enlarge)
    layer.weight.register_hook(lambda gradient: gradient / 2)
    layer.bias.register_post_accumulate_grad_hook(_halve_gradient)
    return layer


def checkpointed(reentrant: bool) -> Calls:
    def function(x: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
        return outer(checkpoint(inner, x, use_reentrant=reentrant))

    return Calls(function, inner=nn.Sequential(linear(), nn.Tanh(), linear()), outer=linear())


def tokens(sparse: bool) -> Calls:
    """Embeds what it takes for two tokens a sample."""
    table = nn.Embedding(7, WIDTH, sparse=sparse)
    return Calls(lambda x, table: table((x.detach()[:, :2] > 0).long()).sum(dim=1) + x, table=table)


def transformer() -> Calls:
    inner = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    return Calls(lambda x, inner: inner(x.unsqueeze(1).expand(-1, 3, -1))[:, 1], inner=inner)


def hooks_its_input(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 1.5)
    return x * 2


class OwnGenerator(nn.Module):
    """Draws twice from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rand(x.shape, generator=self.generator).to(x.dtype)
        return x * scale * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


class Moving(nn.Module):
    """Its output depends on a mean that it moves in every forward, in one of several ways."""

    constant: Tensor
    mean: Any
    late: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.move = how, WAYS_TO_MOVE[how]
        self.register_buffer("constant", torch.arange(float(WIDTH)))
        self.register_buffer("mean", None if how == "made late" else torch.ones(WIDTH))
        self.register_buffer("twin", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.ones(WIDTH, dtype=x.dtype) if self.mean is None else self.mean
        moved = (0.9 * mean + 0.1 * x.detach().mean(dim=0) * self.constant).tanh()
        y = x * mean if self.how == "replaced" else x * mean.clone()
        self.move(self, moved)
        return y + self.late if self.how == "registered late" else y


def _register_late(module: Any, moved: Tensor) -> None:
    if not hasattr(module, "late"):
        module.register_buffer("late", torch.zeros_like(moved))
    module.late = module.late + moved


WAYS_TO_MOVE: dict[str, Callable[[Any, Tensor], object]] = {
    "replaced": lambda module, moved: setattr(module, "mean", moved),
    "made late": lambda module, moved: setattr(module, "mean", moved),
    "copied": lambda module, moved: module.mean.copy_(moved),
    "behind torch's back": lambda module, moved: module.mean.data.copy_(moved),
    "by its other name": lambda module, moved: module.twin.copy_(moved),
    "registered late": _register_late,
}


def writes_sometimes(x: Tensor, seen: Tensor) -> Tensor:
    """Writes a buffer in the forwards of some micro-batches only, and reads it in all."""
    y = x * (1 + seen[:WIDTH].clone())
    if x[0, 0] > 0.2:
        seen[:WIDTH] += x.detach().mean(dim=0)
    return y


def packs(x: Tensor, linear: nn.Linear) -> dict[str, Any]:
    """Returns tensors that share memory, others of odd layouts, and values that are no tensors."""
    both = linear(x)
    left, right = both.chunk(2, dim=1)
    image = both.view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    return {
        "views": (left, [right.t(), None]),
        "image": image,
        "mask": x > 0,
        "scale": 2.0,
        "rows": torch.arange(len(x), device=x.device),
        "none": x[:0],
        "one": x.sum(),
        "wide": x.detach()[:1].expand(len(x), -1),
    }


def unpacks(nest: dict[str, Any]) -> Tensor:
    (left, (right, nothing)), image = nest["views"], nest["image"]
    assert nothing is None
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert not len(nest["none"])
    x = left * nest["mask"] * nest["scale"] + right.t().tanh() + nest["rows"][:, None] * nest["one"]
    return x + image.flatten(1)[:, :WIDTH] + nest["wide"]


def forks() -> Calls:
    """Passes its input on beside its output."""
    return Calls(lambda x, branch: (branch(x), x), branch=linear())


def joins() -> Calls:
    """Adds both, which therefore have one gradient."""
    return Calls(lambda pair: pair[0] + pair[1])


def graph() -> Tensor:
    """The weights of five edges between the numbers of a sample."""
    edges = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 3, 0]])
    numbers = torch.linspace(1, 2, 5)
    return torch.sparse_coo_tensor(edges, numbers, (WIDTH, WIDTH), check_invariants=True).coalesce()


def enters() -> Calls:
    """Passes on a sparse tensor that it holds."""
    return Calls(lambda x, graph: {"x": x, "graph": graph}, graph=nn.Buffer(graph()))


def convolves() -> Calls:
    """Over the sparse tensor that it is given, which it passes on."""

    def function(given: dict[str, Tensor], inner: nn.Module) -> dict[str, Tensor]:
        x = torch.sparse.mm(given["graph"], inner(given["x"]).t()).t()
        return {"x": x.tanh(), "graph": given["graph"]}

    return Calls(function, inner=linear())


def leaves() -> Calls:
    return Calls(lambda given: given["x"])


class Embeds(nn.Module):
    """Embeds words ``[samples, positions]``, those that are masked as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        embedded = self.table(ids) * scale
        return embedded if mask is None else embedded * mask[..., None]
