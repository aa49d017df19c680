"""A profile leaves the model as it was: state, gradients, random states, flags and hooks."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support import plain
from tests.support.pieces import First
from tests.support.two_parts import Calls


def measure(model: nn.Module, x: Any, **options: Any) -> pipepart.Profile:
    return pipepart.profile(model, x, seconds=0, devices=1, progress=False, **options)


def hook_based(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return norm(nn.Linear(4, 4))


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 4))


def frozen_first() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4)
    ),
    "lstm": lambda: nn.Sequential(nn.LSTM(4, 4, batch_first=True), First()),
    "spectral norm by hook": lambda: nn.Sequential(hook_based(nn.utils.spectral_norm), nn.Linear(4, 4)),
    "frozen first": frozen_first,
    "TorchScript": lambda: nn.Sequential(nn.Linear(4, 4), scripted(), nn.Linear(4, 4)),
    "used twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 3),
    "writes into its input": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "writes its weight": lambda: nn.Sequential(
        Calls(lambda x: x.detach().argmax(1)), nn.Embedding(4, 4, max_norm=0.1)
    ),
    "draws": lambda: nn.Sequential(
        nn.Linear(4, 4), Calls(lambda x: x * random.random() * float(np.random.rand()) * torch.rand(()))
    ),
}


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * output - target).pow(2).mean()


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a training script could see of the model and the process."""
    return {
        "values": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "identities": [id(t) for t in (*model.parameters(), *model.buffers())],
        "memory": [t.data_ptr() for t in (*model.parameters(), *model.buffers())],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "order": [[*module._parameters.keys(), *module._buffers.keys()] for module in model.modules()],
        "gradients": plain.gradients(model),
        "gradient identities": [id(parameter.grad) for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "weights": [id(vars(module).get("weight")) for module in model.modules()],
        "flat weights": [
            [id(weight) for weight in module._flat_weights]
            for module in model.modules()
            if isinstance(module, nn.LSTM)
        ],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "threads": torch.get_num_threads(),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what in before:
        if what in ("values", "gradients"):
            plain.assert_same(after[what], before[what])
        elif what == "torch":
            assert after[what].equal(before[what])
        else:
            assert after[what] == before[what], what


@pytest.mark.parametrize(("kind", "trained"), [*((kind, True) for kind in MODELS), ("batch norm", False)])
def test_the_model_comes_back_as_it_was(kind, trained):
    model = MODELS[kind]()
    x = torch.randn(6, 3, 4) if kind == "lstm" else torch.randn(6, 4)
    if trained:
        model(x.clone()).sum().backward()
    before, loss_fn = snapshot(model), Scaled()
    sample, target = x.clone().requires_grad_(kind == "batch norm"), torch.zeros_like(x).requires_grad_()
    measure(model, sample, loss_fn=loss_fn, target=target, micro_batches=2)
    assert_unchanged(before, snapshot(model))
    assert sample.equal(x)
    assert all(given.grad is None for given in (sample, target, loss_fn.scale))


class Dropped(nn.Module):
    """Dropout on TorchScript, whose mode is not an attribute in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_in_evaluation_mode_is_measured_in_training_mode_and_comes_back_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), torch.jit.script(Dropped()))
    x = torch.randn(6, 4)
    trained = measure(model, x)
    model.eval()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="evaluation mode and was profiled in training mode"):
        profile = measure(model, x)
    plain.assert_same(model.state_dict(), values)
    assert not any(module.training for module in model.modules())
    assert profile.costs[0].saved == trained.costs[0].saved


def test_hooks_of_parameters_do_not_fire_and_stay():
    calls: list[str] = []
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second)
    first.weight.register_hook(lambda gradient: calls.append("gradient"))
    second.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    measure(model, torch.randn(6, 4), loss_fn=nn.MSELoss(), target=torch.zeros(6, 4))
    assert calls == []
    model(torch.randn(6, 4)).sum().backward()
    assert sorted(calls) == ["accumulated", "gradient"]


class Fails(nn.Module):
    """Raises at one call, or in the backward of one."""

    def __init__(self, at: int, backward: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.at, self.in_backward = at, backward

    def forward(self, x: Tensor) -> Tensor:
        calls.append(0)
        y = self.norm(x)
        if len(calls) >= self.at:
            if not self.in_backward:
                raise OSError("on purpose")
            y.register_hook(self.fail) if y.requires_grad else None
        return y

    def fail(self, gradient: Tensor) -> None:
        raise OSError("on purpose")


calls: list[int] = []


@pytest.mark.parametrize(("at", "backward"), [(2, False), (3, True), (6, False), (6, True)])
def test_an_exception_leaves_the_model_as_it_was_and_names_the_layer(at, backward):
    model = nn.Sequential(nn.Linear(4, 4), Fails(at, backward), nn.Linear(4, 4))
    calls.clear()
    x = torch.randn(6, 4)
    before = snapshot(model)
    with pytest.raises(OSError, match="on purpose") as caught:
        measure(model, x, loss_fn=nn.MSELoss(), target=torch.zeros(6, 4))
    assert "'1'" in "".join(caught.value.__notes__)
    assert_unchanged(before, snapshot(model))
