"""A model that is cut for such devices has the parameters that it had, also those that layers share."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.on_devices import cut_on, gradients, sample


class Again(nn.Module):
    """Uses the weight of another layer."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("held", [False, True])
def test_what_layers_share_they_share_when_they_were_moved(held):
    """Torch makes new parameters on such devices; where a graph still holds the old ones, there is no other way."""
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), Again(first), nn.Linear(4, 4)).double()
    reference = plain.twin(model)
    x, y = sample(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = model(x) if held else None
    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(gradients(model), plain.gradients(reference))
    assert first.weight.device == torch.device("vdev:0")
    assert (optimizer.param_groups[0]["params"][0] is first.weight) is (graph is None)


@pytest.mark.parametrize("held", [False, True])
def test_hooks_of_parameters_come_along(held):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    reference = plain.twin(model)
    seen: list[int] = []
    for one in (model, reference):
        one.get_parameter("0.weight").register_hook(lambda gradient: gradient * 3)
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda _: seen.append(2))
    removed = model.get_parameter("2.bias").register_hook(lambda gradient: gradient * 5)
    x, y = sample(8, 4)
    graph = model(x) if held else None
    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss()) as pipe:
        removed.remove()
        pipe.step(x, target=y)
    del graph
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(gradients(model), plain.gradients(reference))
    assert seen == [2] * 4
