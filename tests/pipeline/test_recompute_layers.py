"""Layers of every sort under recomputation: in place, differentiating themselves, drawing on their own, nests."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand
from tests.support.recomputed import check_all_modes


def test_evaluation_with_gradients():
    """Attention takes another way through its kernel where nothing is to be differentiated."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(40, 3)).eval()
    check_all_modes(
        model, borders=(1, 2), data=lambda: (torch.randn(11, 5, 8), torch.randint(3, (11,))), steps=1
    )


class Double(nn.Module):
    """Writes over its input, and has no flag that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("layer", [nn.Identity, lambda: nn.Flatten(0, -1), nn.Dropout])
def test_an_input_that_a_stage_passes_on_and_the_next_one_writes_into(layer):
    """The memory of both inputs is the same; each second forward must find it as the first did."""
    shape = nn.Unflatten(0, (-1, 6))
    passing = [nn.Sequential(layer(), shape)] if layer not in (nn.Identity, nn.Dropout) else [layer()]
    model = nn.Sequential(nn.Linear(6, 6), *passing, Double(), nn.Linear(6, 6), Double(), nn.Linear(6, 3))
    last = len(passing[0]) if isinstance(passing[0], nn.Sequential) else 1
    check_all_modes(model, borders=(1, 1 + last, 3 + last))
    check_all_modes(model.eval(), borders=(1, 1 + last, 3 + last))


def test_the_callers_input_is_left_alone():
    model = nn.Sequential(Double(), nn.Linear(6, 3))
    x = torch.ones(8, 6)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), recompute="always") as pipe:
        for _ in range(2):
            pipe.step(x, target=torch.zeros(8, 3))
    assert x.eq(1).all()


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_a_layer_with_a_generator_of_its_own(recompute: Recompute):
    """Its draws are those of one forward a micro-batch, several in a forward, and the generator is as far on."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.rand(x.shape, generator=self.generator)
            mask = torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
            return x * scale * mask

    noisy, theirs = Noisy(), Noisy()
    model = nn.Sequential(nn.Linear(6, 6), noisy, nn.Linear(6, 3))
    reference = nn.Sequential(plain.twin(model[0]), theirs, plain.twin(model[2]))
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    with cut_by_hand(
        model, [1], loss_fn=nn.MSELoss(), micro_batches=4, schedule="gpipe", recompute=recompute
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    assert noisy.generator.get_state().equal(theirs.generator.get_state())


def test_a_hook_that_a_layer_puts_on_its_input_runs_once():
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.5)
            return x * 2

    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3))
    check_all_modes(model, borders=(1, 2), data=lambda: (torch.randn(8, 4), torch.randint(3, (8,))))
