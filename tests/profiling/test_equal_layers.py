"""Equal layers are timed once, and what was measured stands for all; layers that may differ are timed each."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support.counted_work import Block, D, counted_in_place_of_time
from tests.support.tally import calls

N = 8
SPEED = pipepart.profiling.Roofline.parse("cpu: 1 TFLOP/s, 1 TB/s, 1 us")


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_in_place_of_time(monkeypatch)


def profile(model: nn.Module, sample: Any = None, **options: Any) -> pipepart.Profile:
    x = torch.randn(N, D) if sample is None else sample
    return pipepart.profile(model, x, seconds=0, devices=1, progress=False, **options)


def timed(model: nn.Module, sample: Any = None) -> int:
    """How many layers were timed themselves."""
    found = profile(model, sample)
    return len(found.layers) - sum(int(note.split(" timed for ")[1].split()[0]) - 1 for note in found.notes)


def test_equal_layers_are_timed_once_and_the_profile_says_so():
    blocks = [Block() for _ in range(6)]
    found = profile(nn.Sequential(*blocks))
    found_calls = calls()
    memory = found_calls[blocks[2]]
    assert memory == 2  # a pass for saved tensors, and one for deferred gradients
    assert [found_calls[block] > memory for block in blocks] == [True, True, False, False, False, False]
    (note,) = found.notes  # the first block has no gradient to compute for its input
    assert "1 was timed for 5 layers" in note
    assert {cost.forward.seconds for cost in found.costs[0].layers} == {N * D}
    assert not profile(nn.Sequential(*blocks), share=False).notes
    found_calls = calls()
    assert min(found_calls[block] for block in blocks) > 20


ORDERS: dict[str, Callable[[], list[nn.Module]]] = {
    "a run of equal ones": lambda: [Block() for _ in range(5)],
    "a kind that comes back behind another": lambda: [Block(1 + i) for i in (0, 1, 2, 3, 1, 4, 1, 2)],
    "writes in place": lambda: [
        *(
            Block(),
            nn.Tanh(),
            Block(2),
            Block(),
            nn.ReLU(inplace=True),
            Block(),
            Block(2),
            nn.ReLU(inplace=True),
        )
    ],
    "frozen ones first": lambda: [*(Block().requires_grad_(False) for _ in range(3)), Block(), Block()],
    "with dropout and batch norm": lambda: [
        m for _ in range(3) for m in (Block(), nn.BatchNorm1d(D), nn.Dropout())
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_shared_costs_are_those_that_each_layer_has(order):
    model = nn.Sequential(*ORDERS[order]())
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "target": torch.zeros(N, D)}
    shared, each = (profile(model, **options, share=share).costs[0] for share in (True, False))
    assert shared == each.model_copy(update={"repeats": shared.repeats})
    assert sum(cost.forward.seconds for cost in shared.layers) >= N * D


class Model(nn.Module):
    """Blocks with a mask and positions that skip them, as in a transformer."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, D)
        self.blocks = nn.ModuleList(Masked(number) for number in range(blocks))
        self.head = nn.Linear(D, 10)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]) / 10
        x = self.embed(ids) + positions[:, None]
        for block in self.blocks:
            x = block(x, positions.cos(), mask[..., None].float())
        return self.head(x)


class Masked(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.block = Block()
        self.layer_idx = number

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return self.block(x * positions[:, None]) * mask


def test_blocks_of_a_recorded_model_are_equal_though_they_have_numbers():
    model = Model(6)
    sample = torch.randint(10, (N, 5)), torch.ones(N, 5)
    shared, each = (profile(model, sample, share=share) for share in (True, False))
    (note,) = shared.notes
    assert note.startswith("blocks.1 was timed for 4 layers"), note  # the last one passes no mask on
    assert shared.costs[0] == each.costs[0].model_copy(update={"repeats": shared.costs[0].repeats})


class Numbered(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number


class Scales(Numbered):
    """What it does depends on its number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.layer_idx + 1)


def listing(values: list[Any]) -> nn.Module:
    block = Block()
    block.values = values  # type: ignore[assignment]
    return block


def own_forward(block: nn.Module) -> nn.Module:
    block.forward = functools.partial(type(block).forward, block)  # type: ignore[method-assign]
    return block


def hooked(block: nn.Module, hook: Callable[..., None]) -> nn.Module:
    block.register_forward_hook(hook)
    return block


def some_hook(*_: Any) -> None: ...


def tied() -> list[nn.Module]:
    one, other = Block(), Block()
    other.linear.weight = one.linear.weight
    return [one, other]


def reordered() -> list[nn.Module]:
    one, other = Block(), Block()
    other.linear.weight = nn.Parameter(torch.randn(D, D).t())
    return [one, other]


PAIRS: dict[str, tuple[Callable[[], list[nn.Module]], bool]] = {
    "another number of their own": (lambda: [Numbered(1), Numbered(2)], True),
    "the same module twice": (lambda: [nn.Tanh()] * 2, True),
    "equal lists of numbers": (lambda: [listing([1, 2.5]), listing([1, 2.5])], True),
    "one object": (lambda: (lambda thing: [listing([thing]), listing([thing])])(object()), True),
    "objects of their own": (lambda: [listing([object()]), listing([object()])], False),
    "another setting": (lambda: [Block(1), Block(2)], False),
    "another number, used": (lambda: [Scales(1), Scales(2)], False),
    "a frozen bias": (lambda: [Block(), _frozen(Block())], False),
    "a hook more": (lambda: [Block(), hooked(Block(), some_hook)], False),
    "forwards of their own": (lambda: [own_forward(Block()), own_forward(Block())], False),
    "a weight in two layers": (tied, False),
    "another memory layout": (reordered, False),
}


def _frozen(block: Block) -> Block:
    block.linear.bias.requires_grad_(False)
    return block


@pytest.mark.parametrize("pair", PAIRS)
def test_layers_are_shared_if_nothing_can_tell_them_apart(pair):
    make, equal = PAIRS[pair]
    model = nn.Sequential(Block(5), *make(), Block(6))
    assert timed(model) == (3 if equal else 4)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(D, D)

    def forward(self, y: Tensor, code: Tensor) -> Tensor:
        return self.own(y) + code


class Encoded(nn.Module):
    """Uses its code between two equal layers, and returns it beside its loss, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.start, self.decode, self.head = (
            nn.Linear(D, D),
            nn.Linear(D, D),
            Joined(),
            nn.Linear(D, D),
        )
        self.first, self.second = nn.Tanh(), nn.Tanh()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encode(x)
        y = self.decode(self.first(self.start(x)), code)
        return {"loss": self.head(self.second(y)).pow(2).mean(), "code": code}


def test_a_layer_that_a_value_passes_without_a_gradient_stands_for_none_that_it_passes_with_one():
    layers = ["encode", "start", "first", "decode", "second", "head"]
    shared, alone = (
        profile(Encoded(), layers=layers, share=share, measure=False, roofline=SPEED)
        for share in (True, False)
    )
    works = [[cost.backward_seconds > 0 for cost in one.costs[0].layers] for one in (shared, alone)]
    assert works == [[True] * 6] * 2
