"""A model that is not on the device that is measured: one layer at a time is there, and the model stays as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support.counted_work import Block, D, counted_in_place_of_time
from tests.support.pieces import First

pytestmark = pytest.mark.usefixtures("short_profiles")

N = 8


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_in_place_of_time(monkeypatch)


def profile(model: nn.Module, x: Any, **options: Any) -> pipepart.Profile:
    return pipepart.profile(model, x, seconds=0, devices=1, progress=False, **options)


class Tagged(nn.Module):
    """A block that scales by a plain tensor of its own and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = torch.ones(D)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.block(x) * self.scale


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Embedding(10, D), Block(), nn.Tanh(), Block(2), nn.Identity(), Block(2).requires_grad_(False)),
        *(nn.ReLU(inplace=True), nn.Unflatten(2, (4, 4)), nn.Flatten(2), nn.BatchNorm1d(5), nn.Dropout()),
        *(Tagged(), nn.Linear(D, 3)),
    )


class Tokens(nn.Module):
    """Blocks with a mask and positions that skip them, a plain tensor, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, D)
        self.blocks = nn.ModuleList(Block(1 + i % 2) for i in range(4))
        self.head = nn.Linear(D, 10, bias=False)
        self.head.weight = self.embed.weight
        self.table = torch.linspace(0, 1, D)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x + self.table.to(x.device) + torch.arange(D, device=x.device))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())


IDS = torch.randint(10, (N, 5))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_a_sequential_on_meta_has_the_costs_of_a_real_one():
    options: dict[str, Any] = {
        "loss_fn": nn.MSELoss(),
        "target": torch.zeros(N, 5, 3),
        "micro_batches": [1, 2],
    }
    found, expected = (profile(make, IDS, **options) for make in (on_meta(blocks), blocks()))
    assert found.layers == expected.layers
    assert found.device == "cpu"
    for one, other in zip(found.costs, expected.costs, strict=True):
        assert one == other.model_copy(update={"repeats": one.repeats})
    assert sum(cost.forward.seconds for cost in found.costs[0].layers) > 0


def test_a_recorded_model_on_meta_has_the_costs_of_a_real_one():
    found, expected = profile(on_meta(Tokens), (IDS, IDS)), profile(Tokens(), (IDS, IDS))
    assert found.layers == expected.layers
    assert found.costs[0] == expected.costs[0].model_copy(update={"repeats": found.costs[0].repeats})


def everything(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    attributes = [
        {name: value for name, value in vars(module).items() if not isinstance(value, dict)}
        for module in model.modules()
    ]
    return [*map(id, tensors), *(p.grad for p in model.parameters()), *map(id, model.modules()), attributes]


@pytest.mark.parametrize("make", [blocks, lambda: nn.Sequential(nn.LSTM(D, D), First(), nn.Linear(D, 2))])
def test_a_model_on_meta_stays_there_with_the_same_tensors_and_attributes(make):
    model, x = on_meta(make), IDS if make is blocks else torch.randn(N, 5, D)
    before, drawn = everything(model), torch.get_rng_state()
    profile(model, x)
    assert everything(model) == before
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.get_rng_state().equal(drawn)


class Looks(nn.Module):
    """Notes which layers of its model have real parameters while it runs."""

    def __init__(self, number: int, seen: dict[int, set[int]]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.number, self.seen = number, seen

    def forward(self, x: Tensor) -> Tensor:
        real = {n for n, layer in enumerate(models[-1]) if not all(p.is_meta for p in layer.parameters())}
        self.seen.setdefault(self.number, set()).update(real)
        return self.linear(x)


models: list[nn.Sequential] = []


def test_no_more_than_one_layer_is_real_at_a_time():
    seen: dict[int, set[int]] = {}
    model = on_meta(lambda: nn.Sequential(*(Looks(number, seen) for number in range(5))))
    assert isinstance(model, nn.Sequential)
    models[:] = [model]
    profile(model, torch.randn(N, D), loss_fn=nn.MSELoss(), target=torch.zeros(N, D))
    assert seen == {number: {number} for number in range(5)}


def test_what_a_layer_raises_names_it_and_leaves_the_model_on_meta():
    model = on_meta(lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(3, D)))
    before = everything(model)
    with pytest.raises(RuntimeError) as caught:
        profile(model, torch.randn(N, D))
    assert "'2'" in "".join(caught.value.__notes__)
    assert everything(model) == before
