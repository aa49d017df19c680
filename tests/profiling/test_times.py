"""Times of layers, on work that is counted in place of seconds: each layer's own; on meta one layer at a time."""

import threading
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart.profiling import Costs, timing
from tests.support.pieces import First
from tests.support.two_parts import Calls, splits

pytestmark = pytest.mark.usefixtures("short_profiles")


WIDTH = 16

_work: SimpleQueue[float] = SimpleQueue()  # which no profile puts back as it was
_calls: SimpleQueue[None] = SimpleQueue()


class Clock:
    """In place of the host's clock: shows the work that layers have done, and nothing else."""

    _seconds = 0.0

    def perf_counter(self) -> float:
        self._seconds += sum(_work.get_nowait() for _ in range(_work.qsize()))
        return self._seconds


clock = Clock()


class _Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        _work.put(seconds * x.numel())
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _work.put(3 * ctx.seconds * gradients[0].numel())
        return gradients[0], None


class Block(nn.Module):
    """Works for ``seconds`` an element, forward, and three times as long backward. Counts its calls."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        _calls.put(None)
        return _Works.apply(self.linear(x), self.seconds)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let profiles see the work of blocks as their seconds."""
    monkeypatch.setattr(timing, "time", clock)


N, D = 256, 256  # smaller layers may be measured to take no time on a busy machine


def costs_of(*modules: nn.Module, **options) -> Costs:
    return pipepart.profile(nn.Sequential(*modules), torch.randn(N, D), seconds=0.05, **options).costs[0]


@pytest.mark.usefixtures("counted")
def test_the_seconds_of_a_layer_are_those_of_its_own_work():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(1), Block(10))
    profile = pipepart.profile(model, torch.randn(N, WIDTH), micro_batches=[1, 4], seconds=0, devices=1)
    for costs in profile.costs:
        elements = N // costs.micro_batches * WIDTH
        assert [layer.forward.seconds for layer in costs.layers] == [0, elements, 10 * elements]
        assert [layer.backward_seconds for layer in costs.layers] == [0, 3 * elements, 30 * elements]


class Pausing(Block):
    """Works longer in one of its calls."""

    def __init__(self, seconds: float, call: int) -> None:
        super().__init__()
        self.in_call, self.call, self.count = seconds, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seconds = self.in_call if self.count == self.call else 1.0
        return super().forward(x)


@pytest.mark.parametrize(("seconds", "longest"), [(1.6, 1.6), (100.0, 2.0)])
@pytest.mark.usefixtures("counted")
def test_a_long_time_counts_no_more_than_twice_the_median(seconds, longest):
    model, x = nn.Sequential(Pausing(1.0, 0)), torch.randn(N, WIDTH)
    before = _calls.qsize()
    pipepart.profile(model, x, seconds=0, devices=1)
    passes = _calls.qsize() - before
    profile = pipepart.profile(nn.Sequential(Pausing(seconds, passes)), x, seconds=0, devices=1)
    (layer,) = profile.costs[0].layers
    assert layer.forward.seconds == pytest.approx((11 + longest) / 12 * N * WIDTH)


@splits
def test_which_layers_have_which_parts_of_a_backward():
    """Nothing before the first trained layer; and a normalisation's weights cannot wait."""
    frozen = nn.Linear(D, D).requires_grad_(False)
    costs = costs_of(
        *(frozen, nn.Tanh(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D).requires_grad_(False)),
        *(nn.LayerNorm(D), nn.ReLU(inplace=True), nn.Linear(D, D)),
    )
    assert all(layer.forward.seconds > 0 for layer in costs.layers)
    assert [layer.backward_seconds > 0 for layer in costs.layers] == [False] * 2 + [True] * 6
    weights = [layer.backward_weight.seconds > 0 for layer in costs.layers]
    assert weights == [False, False, True, False, False, False, False, True]
    assert all(layer.backward_input.seconds > 0 for layer in costs.layers[3:])


def test_layers_run_with_the_threads_that_are_asked_for():
    seen: set[int] = set()
    ask = Calls(lambda x: (seen.add(torch.get_num_threads()), x * 1)[1])
    model = nn.Sequential(nn.Linear(D, D), ask)
    profile = pipepart.profile(model, torch.randn(N, D), seconds=0, threads=2)
    assert profile.threads == 2
    assert seen == {2}
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("devices", "cores", "threads", "load"), [(1, 8, 1, 0), (4, 8, 1, 3), (8, 4, 2, 1)])
def test_as_many_copies_of_the_model_run_beside_it_as_there_will_be_devices_and_cores(
    monkeypatch, devices, cores, threads, load
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    names: set[str] = set()
    model = nn.Sequential(
        nn.Linear(D, D), Calls(lambda x: (names.add(threading.current_thread().name), x)[1])
    )
    pipepart.profile(model, torch.randn(N, D), seconds=0.1, devices=devices, threads=threads)
    assert len([name for name in names if "load" in name]) == load
    assert len(names) == load + 1


SAMPLES = 8


def profile(model: nn.Module, x: Any, **options: Any) -> pipepart.Profile:
    return pipepart.profile(model, x, seconds=0, devices=1, progress=False, **options)


class Tagged(nn.Module):
    """A block that scales by a plain tensor of its own and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = torch.ones(WIDTH)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.block(x) * self.scale


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Embedding(10, WIDTH),
            Block(),
            nn.Tanh(),
            Block(2),
            nn.Identity(),
            Block(2).requires_grad_(False),
        ),
        *(nn.ReLU(inplace=True), nn.Unflatten(2, (4, 4)), nn.Flatten(2), nn.BatchNorm1d(5), nn.Dropout()),
        *(Tagged(), nn.Linear(WIDTH, 3)),
    )


class Tokens(nn.Module):
    """Blocks with a mask and positions that skip them, a plain tensor, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block(1 + i % 2) for i in range(4))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.table = torch.linspace(0, 1, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x + self.table.to(x.device) + torch.arange(WIDTH, device=x.device))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())


IDS = torch.randint(10, (SAMPLES, 5))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


OPTIONS = {"loss_fn": nn.MSELoss(), "target": torch.zeros(SAMPLES, 5, 3), "micro_batches": [1, 2]}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("make", "x", "options"), [(blocks, IDS, OPTIONS), (Tokens, (IDS, IDS), {})])
def test_a_model_on_meta_has_the_costs_of_a_real_one(make, x, options):
    found, expected = (profile(model, x, **options) for model in (on_meta(make), make()))
    assert found.layers == expected.layers
    assert found.device == "cpu"
    for one, other in zip(found.costs, expected.costs, strict=True):
        assert one == other.model_copy(update={"repeats": one.repeats})
    assert sum(cost.forward.seconds for cost in found.costs[0].layers) > 0


def everything(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    attributes = [
        {name: value for name, value in vars(module).items() if not isinstance(value, dict)}
        for module in model.modules()
    ]
    return [*map(id, tensors), *(p.grad for p in model.parameters()), *map(id, model.modules()), attributes]


@pytest.mark.parametrize(
    "make", [blocks, lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH), First(), nn.Linear(WIDTH, 2))]
)
def test_a_model_on_meta_stays_there_with_the_same_tensors_and_attributes(make):
    model, x = on_meta(make), IDS if make is blocks else torch.randn(SAMPLES, 5, WIDTH)
    before, drawn = everything(model), torch.get_rng_state()
    profile(model, x)
    assert everything(model) == before
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.get_rng_state().equal(drawn)


def test_no_more_than_one_layer_is_real_at_a_time():
    model: Any = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))))
    seen: dict[int, set[int]] = {number: set() for number in range(5)}
    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(
            lambda *_, own=seen[number]: own.update(n for n in range(5) if not model[n].weight.is_meta)
        )
    profile(model, torch.randn(SAMPLES, WIDTH), loss_fn=nn.MSELoss(), target=torch.zeros(SAMPLES, WIDTH))
    assert seen == {number: {number} for number in range(5)}


def test_what_a_layer_raises_names_it_and_leaves_the_model_on_meta():
    model = on_meta(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH))
    )
    before = everything(model)
    with pytest.raises(RuntimeError) as caught:
        profile(model, torch.randn(SAMPLES, WIDTH))
    assert "'2'" in "".join(caught.value.__notes__)
    assert everything(model) == before
