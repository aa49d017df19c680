"""Times of layers: which costs more is seen, and parts that do not exist cost nothing."""

import threading
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart.profiling import Costs
from tests.support.two_parts import splits


def costs_of(*modules: nn.Module, x: Tensor | None = None, **options) -> Costs:
    sample = torch.randn(256, 256) if x is None else x
    return pipepart.profile(nn.Sequential(*modules), sample, seconds=0.1, **options).costs[0]


class Busy(nn.Module):
    """Multiplies matrices so and so often in the forward, and so and so often in the backward."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.rounds = forward, backward
        self.matrix = torch.eye(256)

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = self.rounds
        y = self.work(x.detach(), forward) * 0 + x
        if y.requires_grad:
            y.register_hook(lambda gradient: self.work(gradient, backward))
        return y

    def work(self, x: Tensor, rounds: int) -> Tensor:
        for _ in range(rounds):
            x = x @ self.matrix
        return x


def test_a_layer_that_works_ten_times_as_much_is_seen_to_cost_clearly_more():
    """A machine under load stretches the longer work at least as much as the shorter."""
    costs = costs_of(nn.Linear(256, 256), Busy(2, 20), Busy(20, 2))
    first, second = costs.layers[1:]
    assert second.forward.seconds > 2 * first.forward.seconds
    assert first.backward_seconds > 2 * second.backward_seconds


def test_smaller_micro_batches_take_less_time():
    profile = pipepart.profile(
        nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)),
        torch.randn(512, 256),
        micro_batches=[1, 16],
        seconds=0.1,
    )
    whole, part = profile.at(1), profile.at(16)
    assert sum(layer.seconds for layer in part.layers) < sum(layer.seconds for layer in whole.layers)


@splits
def test_layers_without_trained_parameters_have_no_weight_part():
    frozen = nn.Linear(256, 256).requires_grad_(False)
    costs = costs_of(nn.Linear(256, 256), nn.ReLU(), frozen, nn.ReLU(inplace=True), nn.Linear(256, 256))
    assert [layer.backward_weight.seconds > 0 for layer in costs.layers] == [True, False, False, False, True]
    assert all(layer.backward_input.seconds > 0 for layer in costs.layers[1:])


@splits
def test_the_first_trained_layer_leaves_all_to_its_weight_part_and_what_is_before_it_has_no_backward():
    frozen = nn.Linear(256, 256).requires_grad_(False)
    costs = costs_of(frozen, nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 256))
    assert [layer.backward_seconds > 0 for layer in costs.layers] == [False, False, True, True]
    assert costs.layers[2].backward_input.seconds < costs.layers[2].backward_weight.seconds / 2
    assert costs.layers[3].backward_input.seconds > 0
    assert all(layer.forward.seconds > 0 for layer in costs.layers)


@splits
def test_a_layer_whose_weights_cannot_wait_has_no_weight_part():
    """Neither a normalisation's nor a recurrent layer's: schedules of two parts find it all in the first."""
    costs = costs_of(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256))
    assert [layer.backward_weight.seconds > 0 for layer in costs.layers] == [True, False, True]
    assert costs.layers[1].backward_input.seconds > 0


def test_the_loss_has_costs_of_its_own():
    y = torch.randint(256, (256,))
    with_loss = costs_of(nn.Linear(256, 256), loss_fn=nn.CrossEntropyLoss(), target=y)
    assert with_loss.loss.forward.seconds > 0
    assert with_loss.loss.backward_seconds > 0
    assert costs_of(nn.Linear(256, 256)).loss.seconds == 0


def test_every_layer_is_timed_several_times_however_little_time_there_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for seconds in (0, 1e-9):
        assert pipepart.profile(model, torch.randn(8, 4), seconds=seconds).costs[0].repeats >= 5


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_run_with_the_threads_that_are_asked_for(threads):
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return x * 1

    seen: set[int] = set()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), Ask())
    profile = pipepart.profile(model, torch.randn(8, 4), seconds=0.01, threads=threads)
    assert profile.threads == threads
    assert seen == {threads}
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_a_number_of_threads_that_no_machine_has_is_refused(threads):
    with pytest.raises(ValueError, match=rf"threads must be between 1 and \d+ .*, got {threads}"):
        pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), threads=threads)


class Notes(nn.Module):
    """Notes the threads that it runs on."""

    threads: ClassVar[set[str]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return x


@pytest.mark.parametrize(
    ("devices", "cores", "threads", "load"),
    [(1, 8, 1, 0), (4, 8, 1, 3), (8, 4, 1, 3), (8, 4, 2, 1), (8, 1, 1, 0)],
)
def test_as_many_copies_of_the_model_run_beside_it_as_there_will_be_devices_and_cores(
    monkeypatch, devices, cores, threads, load
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    Notes.threads.clear()
    model = nn.Sequential(nn.Linear(4, 4), Notes())
    pipepart.profile(model, torch.randn(8, 4), seconds=0.2, devices=devices, threads=threads)
    beside = {name for name in Notes.threads if "load" in name}
    assert len(beside) == load
    assert len(Notes.threads) == load + 1
