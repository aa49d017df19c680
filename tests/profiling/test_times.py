"""Times of layers: work is seen where it is done, and parts that do not exist cost nothing."""

import threading
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart.profiling import Costs
from tests.support.counted_work import Block, calls, counted_in_place_of_time
from tests.support.counted_work import D as WIDTH
from tests.support.two_parts import splits

N, D = 256, 256  # smaller layers may be measured to take no time on a busy machine


def costs_of(*modules: nn.Module, **options) -> Costs:
    return pipepart.profile(nn.Sequential(*modules), torch.randn(N, D), seconds=0.05, **options).costs[0]


def test_the_seconds_of_a_layer_are_those_of_its_own_work(monkeypatch):
    counted_in_place_of_time(monkeypatch)
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


@pytest.mark.parametrize(("seconds", "counted"), [(1.6, 1.6), (100.0, 2.0)])
def test_a_long_time_counts_no_more_than_twice_the_median(monkeypatch, seconds, counted):
    counted_in_place_of_time(monkeypatch)
    model, x = nn.Sequential(Pausing(1.0, 0)), torch.randn(N, WIDTH)
    pipepart.profile(model, x, seconds=0, devices=1)
    passes = calls().total()
    profile = pipepart.profile(nn.Sequential(Pausing(seconds, passes)), x, seconds=0, devices=1)
    (layer,) = profile.costs[0].layers
    assert layer.forward.seconds == pytest.approx((11 + counted) / 12 * N * WIDTH)


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
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return x * 1

    seen: set[int] = set()
    model = nn.Sequential(nn.Linear(D, D), Ask())
    profile = pipepart.profile(model, torch.randn(N, D), seconds=0, threads=2)
    assert profile.threads == 2
    assert seen == {2}
    assert torch.get_num_threads() == 1


class Notes(nn.Module):
    """Notes the threads that it runs on."""

    threads: ClassVar[set[str]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return x


@pytest.mark.parametrize(("devices", "cores", "threads", "load"), [(1, 8, 1, 0), (4, 8, 1, 3), (8, 4, 2, 1)])
def test_as_many_copies_of_the_model_run_beside_it_as_there_will_be_devices_and_cores(
    monkeypatch, devices, cores, threads, load
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    Notes.threads.clear()
    model = nn.Sequential(nn.Linear(D, D), Notes())
    pipepart.profile(model, torch.randn(N, D), seconds=0.1, devices=devices, threads=threads)
    beside = {name for name in Notes.threads if "load" in name}
    assert len(beside) == load
    assert len(Notes.threads) == load + 1
