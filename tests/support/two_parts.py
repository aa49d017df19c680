"""Runs whole and split backwards of the same model on the same samples."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipepart.autograd import graph_cut
from pipepart.autograd.split_backward import WeightGradients, backward_inputs
from tests.support import plain

# An older torch does not say whether a saved tensor is made by a hook: all is left to autograd there.
_NODE: Any = nn.Linear(1, 1)(torch.ones(1, 1)).grad_fn
SPLITS = hasattr(_NODE._raw_saved_mat1, "unpack_hook")
splits = pytest.mark.skipif(not SPLITS, reason="this torch does not say how a saved tensor comes about")


class Outcome(NamedTuple):
    """Gradients after two micro-batches, and the number of deferred uses of weights."""

    inputs: dict[str, Tensor | None]
    weights: dict[str, Tensor | None]
    waited: int


def train(
    model: nn.Module, samples: list[Tensor], split: bool, context: Callable[[], Any] = nullcontext
) -> Outcome:
    """Forward and backward of each sample with made-up gradients of the output; all second parts at the end."""
    generator = torch.Generator().manual_seed(1)
    leaves = [sample.detach().requires_grad_(sample.requires_grad) for sample in samples]
    waiting: list[WeightGradients] = []
    for leaf in leaves:
        with context():
            message, roots = graph_cut.cut(model(leaf))
        gradients = [
            torch.randn(part.shape, generator=generator).to(part) for part in graph_cut.leaves(message)
        ]
        if split:
            waiting.append(backward_inputs(roots, gradients))
        else:
            graph_cut.backward(roots, gradients)
    waited = sum(len(part) for part in waiting)
    for part in waiting:
        part.accumulate()
    return Outcome(
        {str(index): leaf.grad for index, leaf in enumerate(leaves)}, plain.gradients(model), waited
    )


def assert_same_as_fused(
    model: nn.Module, samples: list[Tensor], waits: int, context: Callable[[], Any] = nullcontext
) -> None:
    """Both ways give the same bits, and ``waits`` uses of weights waited in each micro-batch."""
    fused = train(plain.twin(model), samples, False, context)
    ours = train(plain.twin(model), samples, True, context)
    plain.assert_same(ours.inputs, fused.inputs)
    plain.assert_same(ours.weights, fused.weights)
    assert any(gradient is not None for gradient in fused.weights.values())
    assert ours.waited == (waits * len(samples) if SPLITS else 0)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in range(2)]


class Calls(nn.Module):
    """A layer that is one function of its input and of its members: modules, buffers, and tensors to train."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.function, self.names = function, tuple(members)
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Buffer):
                value = nn.Parameter(value)
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})
