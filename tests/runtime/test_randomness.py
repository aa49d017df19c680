"""Random layers draw the same numbers wherever the model is cut and whatever order its stages run in."""

import pytest
import torch
from torch import Tensor, nn

from tests import plain
from tests.chains import cut_by_hand


class Noise(nn.Module):
    """Draws through an operation that takes no generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Dropout(0.3), nn.GELU(), Noise(), nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 1)
    )


def train(model: nn.Module, borders: list[int], schedule: str, steps: int = 3) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(7)
    x, y = torch.linspace(-1, 1, 9 * 12).view(9, 12), torch.linspace(0, 1, 9).view(9, 1)
    found = []
    with cut_by_hand(model, borders, loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
        for _ in range(steps):
            pipe.zero_grad()
            pipe.step(x, target=y)
            found.append(plain.gradients(model))
    return found


@pytest.mark.parametrize("borders", [[1], [2, 4], [1, 2, 3, 5]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
def test_masks_do_not_depend_on_the_cut_or_the_schedule(borders: list[int], schedule: str):
    model = network()
    for ours, theirs in zip(train(model, borders, schedule), train(model, [], "1f1b"), strict=True):
        plain.assert_same(ours, theirs)


def test_each_step_draws_other_numbers():
    first, second, third = train(network(), [3], "1f1b")
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert not torch.equal(second["0.weight"], third["0.weight"])


def test_micro_batches_of_equal_samples_draw_other_masks():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout())
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output == 0))
    with cut_by_hand(model, [1], loss_fn=lambda output: output.mean(), micro_batches=2) as pipe:
        pipe.step(torch.ones(2, 64))
    assert len(seen) == 2
    assert 0.2 < float((seen[0] != seen[1]).float().mean()) < 0.8


def test_the_global_generator_stays_where_it_is_without_random_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)).eval()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        before = torch.get_rng_state()
        pipe.step(torch.ones(6, 4), target=torch.zeros(6, 1))
        assert torch.equal(torch.get_rng_state(), before)
        pipe.train()
        pipe.step(torch.ones(6, 4), target=torch.zeros(6, 1))
        assert not torch.equal(torch.get_rng_state(), before)


def test_an_explicit_generator_is_left_to_its_owner():
    generator = torch.Generator().manual_seed(3)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(x.shape, generator=generator)

    outputs: list[Tensor] = []
    model = nn.Sequential(nn.Identity(), Own())
    model[1].register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    with cut_by_hand(model, [1], loss_fn=lambda output: output.mean(), micro_batches=2) as pipe:
        pipe.step(torch.ones(2, 5, requires_grad=True))
    expected = torch.rand((2, 1, 5), generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.stack(outputs), expected)
