"""Arguments that do not fit raise an error before anything is written or changed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.checkpoint.training import adam, model, training

Sgd = torch.optim.SGD


def odd_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.gamma = {0.1}  # type: ignore[assignment]
    return scheduler


def with_object(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(module.parameters())
    optimizer.state[module.get_parameter("5.weight")]["history"] = {1, 2}
    return optimizer


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"step": -1}, ValueError, "step must be a whole number"),
        ({"step": 2.0}, ValueError, "step must be a whole number"),
        ({"keep": 0}, ValueError, "keep must be at least 1"),
        (
            {"optimizer": Sgd([nn.Parameter(torch.ones(3))], 0.1)},
            ValueError,
            r"shape \(3,\) that is not the model's",
        ),
        ({"optimizer": "adam"}, TypeError, "optimizer must be Optimizer of torch"),
        ({"scheduler": 3}, TypeError, "scheduler must be"),
        ({"scaler": 3}, TypeError, "scaler must be"),
        (
            {"scheduler": adam(model().parameters())},
            TypeError,
            "scheduler must be LRScheduler of torch, got AdamW",
        ),
        (
            {"data": {"images": torch.ones(2**18 + 1)}},
            TypeError,
            r"data\['images'\] is a tensor of 1048580 bytes",
        ),
        ({"data": [lambda: 0]}, TypeError, r"data\[0\] is a function"),
    ],
)
def test_nothing_is_written_if_a_value_cannot_be_saved(tmp_path, how, error, words):
    given = {"step": 1, "optimizer": None, **how}
    with pytest.raises(error, match=words):
        pipepart.save(tmp_path / "run", model(), given.pop("optimizer"), **given)
    assert not (tmp_path / "run").exists()


def test_states_with_objects_are_refused_by_their_key(tmp_path):
    module = model()
    with pytest.raises(TypeError, match=r"optimizer state of 5\.weight\['history'\] is a set"):
        pipepart.save(tmp_path / "run", module, with_object(module), step=0)
    optimizer = adam(module.parameters())
    with pytest.raises(TypeError, match=r"scheduler\['gamma'\] is a set"):
        pipepart.save(tmp_path / "run", module, optimizer, step=0, scheduler=odd_scheduler(optimizer))
    optimizer.param_groups[0]["rule"] = len
    with pytest.raises(TypeError, match=r"settings of optimizer group 0\['rule'\]"):
        pipepart.save(tmp_path / "run", module, optimizer, step=0)
    assert not (tmp_path / "run").exists()


def test_two_optimizers_share_no_parameter_and_those_of_stages_are_enough(tmp_path):
    module = model()
    with pytest.raises(ValueError, match=r"two optimizers have the parameter '0\.bias'"):
        pipepart.save(tmp_path, module, [adam(module.parameters()), adam(module.parameters())], step=0)
    with (made := training(of_stages=True)).pipe, pytest.raises(ValueError, match="optimizers of their own"):
        pipepart.save(tmp_path, made.pipe, adam(made.pipe.parameters()), step=0)


def test_steps_go_up_within_a_folder(tmp_path):
    module = model()
    pipepart.save(tmp_path, module, step=5)
    for step in (4, 5):
        with pytest.raises(FileExistsError, match="has 'step-5'"):
            pipepart.save(tmp_path, module, step=step)
    with pytest.raises(ValueError, match="is a checkpoint: pass the folder"):
        pipepart.save(tmp_path / "step-5", module, step=6)
    pipepart.save(tmp_path, module, step=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-5", "step-6"]


def renamed(module: nn.Sequential) -> nn.Module:
    layers = list(module)
    return nn.Sequential(*layers[:5], nn.Identity(), *layers[5:])


def wider(module: nn.Sequential) -> nn.Module:
    module[5] = nn.Linear(6, 7)
    return module


MODELS: list[tuple[Any, str]] = [
    (renamed, r"lacks 6\.weight, 6\.bias, 8\.bias; the model does not have 5\.weight, 5\.bias, 7\.bias"),
    (wider, r"5\.weight \(6, 6\) float32 in place of \(7, 6\) float32"),
    (lambda module: module.double(), r"0\.weight \(6, 6\) float32 in place of \(6, 6\) float64"),
    (lambda module: module[:4], r"does not have 5\.weight"),
]


@pytest.mark.parametrize(("change", "words"), MODELS)
def test_another_model_is_refused_and_stays_as_it_is(tmp_path, change, words):
    pipepart.save(tmp_path, model(), step=0)
    other = change(copy.deepcopy(model()))
    before = copy.deepcopy(other.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        pipepart.load(tmp_path, other)
    assert all(value.equal(before[name]) for name, value in other.state_dict().items())
    assert torch.get_rng_state().equal(state)


def without_last(module: nn.Sequential) -> torch.optim.Optimizer:
    return adam(list(module.parameters())[:-1])


def grouped_otherwise(module: nn.Sequential) -> torch.optim.Optimizer:
    return adam([{"params": module[0].parameters()}, {"params": [*module[2:7].parameters(), module[7].bias]}])


OPTIMIZERS: list[tuple[Any, Any, str]] = [
    (None, lambda module: adam(module.parameters()), r"no optimizer state of parameter '0\.weight'"),
    (
        lambda module: adam(module.parameters()),
        without_last,
        r"lacks parameters whose state was saved: 7\.bias",
    ),
    (without_last, lambda module: adam(module.parameters()), r"no optimizer state of parameter '7\.bias'"),
    (
        lambda module: adam(module.parameters()),
        lambda module: Sgd(module.parameters(), 0.1),
        "that of a AdamW, and the optimizer is a SGD",
    ),
    (
        lambda module: adam([{"params": [one], "lr": float(n)} for n, one in enumerate(module.parameters())]),
        grouped_otherwise,
        r"'0\.weight' and '0\.bias' are in one group and had different settings",
    ),
]


@pytest.mark.parametrize(("saved", "loaded", "words"), OPTIMIZERS)
def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path, saved, loaded, words):
    module = model()
    pipepart.save(tmp_path, module, saved and saved(module), step=0)
    other = model()
    with torch.no_grad():
        other.get_parameter("2.weight").add_(1)
    before = copy.deepcopy(other.state_dict())
    optimizer = loaded(other)
    groups = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        pipepart.load(tmp_path, other, optimizer)
    assert all(value.equal(before[name]) for name, value in other.state_dict().items())
    assert optimizer.state_dict() == groups


def test_another_scheduler_and_a_missing_scaler_are_refused(tmp_path):
    module = model()
    optimizer = adam(module.parameters())
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    pipepart.save(tmp_path / "one", module, optimizer, step=0, scheduler=steps)
    pipepart.save(tmp_path / "none", module, optimizer, step=0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with pytest.raises(ValueError, match="the state of a StepLR, and the scheduler is a CosineAnnealingLR"):
        pipepart.load(tmp_path / "one", module, optimizer, scheduler=cosine)
    with pytest.raises(ValueError, match="no state of a scheduler"):
        pipepart.load(tmp_path / "none", module, optimizer, scheduler=steps)
    with pytest.raises(ValueError, match="no state of a scaler"):
        pipepart.load(tmp_path / "none", module, optimizer, scaler=torch.amp.GradScaler("cpu"))
    two = torch.optim.lr_scheduler.StepLR(Sgd([{"params": [one]} for one in module.parameters()], 0.1), 3)
    with pytest.raises(ValueError, match="had 1 groups of parameters, and there are"):
        pipepart.load(tmp_path / "one", module, optimizer, scheduler=two)


def test_a_folder_without_checkpoints_is_not_found(tmp_path):
    for folder in (tmp_path, tmp_path / "none", tmp_path / "step-3"):
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            pipepart.load(folder, model())
    with pytest.raises(TypeError, match="a Pipeline or an nn\\.Module"):
        pipepart.load(tmp_path, {"0.weight": torch.ones(1)})  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", [None, 3, b"run", "", "a\0b"])
def test_what_is_no_path_is_refused(folder):
    for call in (lambda: pipepart.save(folder, model(), step=1), lambda: pipepart.load(folder, model())):
        with pytest.raises((TypeError, ValueError), match="folder must be"):
            call()


def test_a_training_that_goes_on_without_its_optimizer_is_warned(tmp_path):
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    optimizer = adam(module.parameters())
    optimizer.step()
    pipepart.save(tmp_path, module, optimizer, step=1)
    with pytest.warns(UserWarning, match="has the state of an optimizer, which is not loaded"):
        pipepart.load(tmp_path, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipepart.load(tmp_path, module, optimizer)
        pipepart.load(tmp_path, nn.Linear(2, 2).eval())


class Remembers(nn.Linear):
    """Has extra state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


def test_extra_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"0\._extra_state is a dict .* get_extra_state"):
        pipepart.save(tmp_path / "run", nn.Sequential(Remembers(2, 2)), step=1)
    assert not (tmp_path / "run").exists()
