"""A failure in either part of a split backward names its place, and the next step works."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.fuses import Fuse, Trouble
from tests.support.pairwise import pairwise
from tests.support.two_parts import splits


def linear_layers() -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(5)]


@pytest.mark.parametrize(
    ("where", "position", "micro_batch"),
    pairwise(["function", "tensor hook"], [1, 3, 5], [0, 3]),
)
def test_in_the_first_part(where, position, micro_batch):
    fuse = Fuse(where)
    modules = linear_layers()
    modules.insert(position, fuse)
    model = nn.Sequential(*modules)
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        fuse.at = micro_batch
        with pytest.raises(Trouble) as caught:
            pipe.step(x, target=y)
        layer, place = caught.value.__notes__
        assert layer == f"pipepart: in the backward of layer '{position}' (Fuse)"
        assert f"stage {position // 2} of 3" in place
        assert f"(action {position // 2}I{micro_batch})" in place
        fuse.at = None
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Aside(nn.Module):
    """Adds a linear layer of something that asks for no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.ones(2, 4))


def test_a_layer_that_the_first_part_need_not_run_is_not_blamed():
    """Behind the one that fails is one whose node has nothing but weights behind it."""
    fuse = Fuse("tensor hook")
    model = nn.Sequential(nn.Linear(4, 4), fuse, nn.Tanh(), Aside(), nn.Linear(4, 4))
    with cut_by_hand(model, [4], loss_fn=nn.MSELoss(), micro_batches=2, schedule="zb-h1") as pipe:
        fuse.at = 1
        with pytest.raises(Trouble) as caught:
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert caught.value.__notes__[0] == "pipepart: in the backward of layer '1' (Fuse)"


class Overwrites(nn.Module):
    """A linear layer that writes over the input of its last call when it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held: Tensor | None = None
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.held is not None:
            self.held.add_(1)
        own = x * 1
        self.held = own.detach()
        return self.linear(own)


@splits
def test_in_the_second_part():
    """The input of a layer is written into after the first part, which has passed its gradient on already."""
    overwrites = Overwrites()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), overwrites, nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        overwrites.armed = True
        with pytest.raises(RuntimeError, match="has been written into") as caught:
            pipe.step(x, target=y)
        layer, place = caught.value.__notes__
        assert layer == "pipepart: in the backward for the weights of layer '2' (Overwrites)"
        assert "stage 1 of 2" in place
        assert "(action 1W0)" in place
        overwrites.armed, overwrites.held = False, None
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_in_the_backward_of_a_graph_of_the_callers():
    fuse = Fuse("function")
    model = nn.Sequential(*linear_layers()[:3], fuse, nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with cut_by_hand(model, [2], micro_batches=4, schedule="zb-h1") as pipe:
        fuse.at = 2
        output = pipe(x)
        with pytest.raises(Trouble) as caught:
            output.sum().backward()
        assert "(action 1I2)" in caught.value.__notes__[1]
        fuse.at = None
        pipe.zero_grad()
        pipe(x).sum().backward()
    reference = plain.twin(model)
    reference.zero_grad()
    for part in x.tensor_split(4):
        reference(part).sum().backward()
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
