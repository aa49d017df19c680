"""Arguments that do not fit raise an error before anything is written or changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import pipepart
from tests.checkpoint.training import adam, model, training
from tests.support import plain

Sgd = torch.optim.SGD


def odd_scheduler(module: nn.Module) -> dict[str, Any]:
    optimizer = adam(module.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    scheduler.gamma = {0.1}  # type: ignore[assignment]
    return {"optimizer": optimizer, "scheduler": scheduler}


def with_object(module: nn.Module) -> dict[str, Any]:
    optimizer = adam(module.parameters())
    optimizer.state[module.get_parameter("5.weight")]["history"] = {1, 2}
    return {"optimizer": optimizer}


class Remembers(nn.Linear):
    """Has extra state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


def with_extra_state(module: nn.Sequential) -> dict[str, Any]:
    module.append(Remembers(2, 2))
    return {}


LARGE = torch.ones(2**18 + 1)
HOW: list[tuple[Callable[[Any], dict[str, Any]], type[Exception], str]] = [
    (lambda _: {"step": -1}, ValueError, "step must be a whole number"),
    (lambda _: {"step": 2.0}, ValueError, "step must be a whole number"),
    (lambda _: {"keep": 0}, ValueError, "keep must be at least 1"),
    (lambda _: {"folder": "a\0b"}, ValueError, "folder must be"),
    (lambda _: {"folder": b"run"}, TypeError, "folder must be"),
    (lambda _: {"optimizer": Sgd([torch.ones(3)], 0.1)}, ValueError, r"shape \(3,\) that is not the model's"),
    (lambda _: {"optimizer": "adam"}, TypeError, "optimizer must be Optimizer of torch"),
    (lambda _: {"scaler": 3}, TypeError, "scaler must be"),
    (lambda _: {"scaler": [torch.amp.GradScaler("cpu")]}, TypeError, "scaler must be .* got list"),
    (
        lambda module: {"scheduler": adam(module.parameters())},
        TypeError,
        "scheduler must be LRScheduler of torch, got AdamW",
    ),
    (lambda _: {"data": {"images": LARGE}}, TypeError, r"data\['images'\] is a tensor of 1048580 bytes"),
    (lambda _: {"data": [lambda: 0]}, TypeError, r"data\[0\] is a function"),
    (with_object, TypeError, r"optimizer state of 5\.weight\['history'\] is a set"),
    (odd_scheduler, TypeError, r"scheduler\['gamma'\] is a set"),
    (
        lambda module: {"optimizer": adam([{"params": module.parameters(), "rule": len}])},
        TypeError,
        r"settings of optimizer group 0\['rule'\]",
    ),
    (
        lambda module: {"optimizer": [adam(module.parameters()), adam(module.parameters())]},
        ValueError,
        r"two optimizers have the parameter '0\.bias'",
    ),
    (with_extra_state, TypeError, r"8\._extra_state is a dict .* get_extra_state"),
]


@pytest.mark.parametrize(("how", "error", "words"), HOW)
def test_nothing_is_written_if_a_value_cannot_be_saved(tmp_path, how, error, words):
    module = model()
    given = {"step": 1, "folder": tmp_path / "run", **how(module)}
    with pytest.raises(error, match=words):
        pipepart.save(given.pop("folder"), module, **given)
    assert not (tmp_path / "run").exists()


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
    with (made := training(of_stages=True)).pipe, pytest.raises(ValueError, match="optimizers of their own"):
        pipepart.save(tmp_path, made.pipe, adam(made.pipe.parameters()), step=7)


def of_all(module: nn.Module) -> torch.optim.Optimizer:
    return adam(module.parameters())


def without_last(module: nn.Module) -> torch.optim.Optimizer:
    return adam(list(module.parameters())[:-1])


# What is made of the model to load into, the optimizers that are saved and loaded, and what is said.
OTHERS: list[tuple[Any, Any, Any, str]] = [
    (
        lambda module: nn.Sequential(*module[:5], nn.Identity(), *module[5:]),
        None,
        None,
        r"lacks 6\.weight, 6\.bias, 8\.bias; the model does not have 5\.weight, 5\.bias, 7\.bias",
    ),
    (
        lambda module: nn.Sequential(*module[:5], nn.Linear(6, 7), *module[6:]),
        None,
        None,
        r"5\.weight \(6, 6\) float32 in place of \(7, 6\) float32",
    ),
    (nn.Module.double, None, None, r"0\.weight \(6, 6\) float32 in place of \(6, 6\) float64"),
    (None, None, of_all, r"no optimizer state of parameter '0\.weight'"),
    (None, of_all, without_last, r"lacks parameters whose state was saved: 7\.bias"),
    (None, without_last, of_all, r"no optimizer state of parameter '7\.bias'"),
    (
        None,
        of_all,
        lambda module: Sgd(module.parameters(), 0.1),
        "that of a AdamW, and the optimizer is a SGD",
    ),
    (
        None,
        lambda module: adam([{"params": [one], "lr": float(n)} for n, one in enumerate(module.parameters())]),
        lambda module: adam([{"params": part.parameters()} for part in (module[0], module[2:7])]),
        r"'0\.weight' and '0\.bias' are in one group and had different settings",
    ),
]


@pytest.mark.parametrize(("change", "saved", "loaded", "words"), OTHERS)
def test_another_model_or_optimizer_is_refused_and_nothing_changes(tmp_path, change, saved, loaded, words):
    module, other = model(), model()
    pipepart.save(tmp_path, module, saved and saved(module), step=0)
    other = change(other) if change else other
    with torch.no_grad():
        other.get_parameter("2.weight").add_(1)
    optimizer = loaded(other) if loaded else None
    before = copy.deepcopy((other.state_dict(), optimizer and optimizer.state_dict()))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        pipepart.load(tmp_path, other, optimizer)
    plain.assert_same(other.state_dict(), before[0])
    assert (optimizer and optimizer.state_dict()) == before[1]
    assert torch.get_rng_state().equal(state)


def test_another_scheduler_and_a_missing_scaler_are_refused(tmp_path):
    module = model()
    optimizer = adam(module.parameters())
    steps = lr_scheduler.StepLR(optimizer, 3)
    pipepart.save(tmp_path / "one", module, optimizer, step=0, scheduler=steps)
    pipepart.save(tmp_path / "none", module, optimizer, step=0)
    groups = Sgd([{"params": [one]} for one in module.parameters()], 0.1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("one", {"scheduler": cosine}, "the state of a StepLR, and the scheduler is a CosineAnnealingLR"),
        ("one", {"scheduler": lr_scheduler.StepLR(groups, 3)}, "had 1 groups of parameters, and there are"),
        ("none", {"scheduler": steps}, "no state of a scheduler"),
        ("none", {"scaler": torch.amp.GradScaler("cpu")}, "no state of a scaler"),
    ]
    for folder, given, words in cases:
        with pytest.raises(ValueError, match=words):
            pipepart.load(tmp_path / folder, module, optimizer, **given)


def test_what_is_no_checkpoint_is_not_loaded(tmp_path):
    for folder in (tmp_path, tmp_path / "none", tmp_path / "step-3"):
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            pipepart.load(folder, model())
    for odd in (None, 3, ""):
        with pytest.raises((TypeError, ValueError), match="folder must be"):
            pipepart.load(odd, model())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Pipeline or an nn\\.Module"):
        pipepart.load(tmp_path, {"0.weight": torch.ones(1)})  # type: ignore[arg-type]


def test_a_training_that_goes_on_without_its_optimizer_is_warned(tmp_path: Path):
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
