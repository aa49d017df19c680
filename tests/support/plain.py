"""The oracle of training: the plain model on the whole mini-batch, or micro-batch by micro-batch."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipepart import Arguments, collect_losses
from pipepart.capture import flatten
from pipepart.runtime.replay.randomness import RngKeys

_CANCELLED = 1e-3  # of numbers around 1 that add up to less, rounding is what is left


def twin(model: nn.Module) -> nn.Module:
    """Return a copy with parameters of its own."""
    return copy.deepcopy(model)


def call(model: Any, x: Any) -> Any:
    """Call a model with one value or several arguments, which an ``nn.Sequential`` passes to its first layer."""
    if type(x) is not Arguments:
        return model(x)
    if type(model) is nn.Sequential:
        first, *others = model
        return nn.Sequential(*others)(first(*x.args, **x.kwargs))
    return model(*x.args, **x.kwargs)


def whole_step(model: nn.Module, x: Any, y: Any, loss_fn: Callable[..., Tensor]) -> Tensor:
    """Run forward and backward of the whole mini-batch; add the gradients to the model's."""
    loss = loss_fn(call(model, x), y)
    loss.backward()
    return loss.detach()


def micro_batched_step(
    model: nn.Module,
    x: Any,
    y: Any,
    loss_fn: Callable[..., Tensor],
    parts: int,
    mean: bool = True,
    drawing: bool = False,
    replica_of: Sequence[int] = (0,),
) -> Tensor:
    """Forward and backward of one micro-batch after the other, each mean weighted by its share of the samples.

    With ``drawing``, layers draw what those of a pipeline do, which are other numbers than a plain model's.
    ``replica_of`` says which replica takes each micro-batch, and begins anew after its last; their gradients are added
    replica after replica. The first is the model itself, so it adds to the gradients that are there.
    """
    samples = pytree.tree_leaves(x)[0].shape[0]
    total = torch.zeros(())
    draws = RngKeys()
    replicas = [model, *(twin(model) for _ in range(max(replica_of)))]
    for other in replicas[1:]:
        other.zero_grad()
    for index, (xs, ys) in enumerate(zip(split(x, parts), split(y, parts), strict=True)):
        share = pytree.tree_leaves(xs)[0].shape[0] / samples if mean else 1.0
        replica = replicas[replica_of[index % len(replica_of)]]
        output = _forward(replica, xs, index, draws if drawing else None)
        loss = loss_fn(output, ys) * share
        loss.backward()
        total = total + loss.detach()
    draws.finish()
    with torch.no_grad():
        for other in replicas[1:]:
            for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
                if theirs.grad is not None:
                    own.grad = theirs.grad if own.grad is None else own.grad + theirs.grad
    return total


def outputs(model: nn.Module, micro_batches: Sequence[Any], drawing: bool = False) -> list[Tensor]:
    """The forwards of micro-batches; with ``drawing`` as for :func:`micro_batched_step`."""
    draws = RngKeys()
    made = [_forward(model, x, index, draws if drawing else None) for index, x in enumerate(micro_batches)]
    draws.finish()
    return made


def _forward(model: nn.Module, x: Any, micro_batch: int, draws: RngKeys | None) -> Any:
    """The output of a model; with ``draws`` of a chain whose layers draw by their place and the micro-batch."""
    if draws is None:
        return call(model, x)
    for place, (_, layer) in enumerate(flatten(model)):
        with draws.of(place, micro_batch):
            x = layer(x)
    return x


def check_whole(pipe: Any, x: Any, y: Any, loss_fn: Callable[..., Tensor], **how: Any) -> None:
    """Assert that a step without earlier gradients has loss and gradients of the whole mini-batch, up to rounding.

    Losses that layers add count, parameters of the loss have gradients, too. ``y`` and ``loss_fn`` may be None.
    """
    pipe.zero_grad()
    losses = [loss_fn] if isinstance(loss_fn, nn.Module) else []
    theirs = twin(nn.ModuleList([pipe.module, *losses]))
    reference, plain_loss = [*theirs.children(), loss_fn][:2]
    found = pipe.step(x, target=y, **how)
    with collect_losses() as added:
        output = call(reference, x)
    own = output if loss_fn is None else plain_loss(*([output] if y is None else [output, y]))
    expected = own + added.total().to(own.dtype)
    expected.backward()
    assert_near(found, expected.detach(), what="loss")
    assert_close(gradients(nn.ModuleList([pipe.module, *losses])), gradients(theirs))


def check_step(
    pipe: Any,
    x: Any,
    y: Any,
    loss_fn: Callable[..., Tensor],
    parts: int = 3,
    *,
    seed: int | None = None,
    **how: Any,
) -> nn.Module:
    """Assert that a step without earlier gradients has loss and gradients of the plain model, these bit for bit.

    Return the plain model. ``seed``: of what the layers draw; None if they draw nothing.
    """
    pipe.zero_grad()
    reference = twin(pipe.module)
    if drawing := seed is not None:
        torch.manual_seed(seed)
    loss = pipe.step(x, target=y)
    if drawing:
        torch.manual_seed(seed)
    expected = micro_batched_step(reference, x, y, loss_fn, parts, drawing=drawing, **how)
    assert_near(loss.double(), expected.double(), 1e-12 if loss.dtype is torch.double else 1e-6, "loss")
    assert_same(gradients(pipe.module), gradients(reference))
    return reference


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each parameter's gradient, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the names of tensors that differ in a bit, or that are None on one side."""
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, tensor in theirs.items()
        if (tensor is None) != (ours[name] is None) or (tensor is not None and not tensor.equal(ours[name]))
    ]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that both hold the same tensors bit for bit, and None in the same places."""
    wrong = differing(ours, theirs)
    assert not wrong, f"differs: {wrong}"


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], relative: float = 1e-12) -> None:
    """Assert that the difference is at most ``relative`` times the norm, tensor by tensor."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (tensor is None) == (ours[name] is None), name
        if tensor is not None:
            assert_near(ours[name], tensor, relative, name)


def assert_near(ours: Tensor, theirs: Tensor, relative: float = 1e-12, what: str = "tensor") -> None:
    """Fails unless the two differ by at most ``relative`` times the larger norm, where that is no sum that cancels."""
    assert ours.shape == theirs.shape, what
    error = float((ours - theirs).norm())
    size = max(float(theirs.norm()), float(ours.norm()), _CANCELLED)
    assert error <= relative * size, f"{what}: off by {error:.3g} of {size:.3g}"


def in_double(modules: Iterable[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*modules).double()


def sample(samples: int, width: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, width, dtype=torch.double)
    return x, torch.randn(samples, width, dtype=torch.double)


def split(nest: Any, parts: int) -> list[Any]:
    """Return the parts of a nest along dimension 0; what is no tensor is in all of them."""
    leaves, spec = pytree.tree_flatten(nest)
    columns = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([column[part] for column in columns], spec) for part in range(parts)]


def copied(nest: Any) -> Any:
    """Copy the tensors of a nest, for layers that write into their input."""
    return pytree.tree_map_only(Tensor, torch.clone, nest)
