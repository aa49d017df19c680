"""What a border keeps of the graph behind it."""

from typing import Any

import torch
from torch import Tensor

from pipepart.autograd import graph_cut


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_the_graph_of_a_function_of_ones_own_lives_though_its_output_is_gone():
    x = torch.ones(3, requires_grad=True)
    message, roots = graph_cut.cut(Doubled.apply(x.exp()))
    assert message.grad_fn is None
    graph_cut.backward(roots, [torch.ones(3)])
    assert x.grad is not None
    assert x.grad.equal(2 * torch.ones(3).exp())
