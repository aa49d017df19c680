"""A checkpoint loads into any other layout, and training goes on bit for bit, with optimizers and schedulers too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import pipepart
from tests.checkpoint.training import batch, model, training
from tests.support import plain

LAYOUTS: list[dict[str, Any]] = [
    {"borders": (2, 5)},
    {"borders": (4,), "schedule": "gpipe"},
    {"borders": (1, 3, 6), "schedule": "zb-h1"},
    {"borders": (2, 4, 6), "schedule": "interleaved-1f1b", "chunks": 2},
    {"borders": (3,), "recompute": "always"},
]


@pytest.mark.parametrize("of_stages", [False, True])
def test_training_goes_on_as_undisturbed_in_every_other_layout(tmp_path, of_stages):
    for number, layout in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        with (made := training(of_stages=of_stages, **layout)).pipe:
            made.train(0, 3)
            made.save(folder, 3, data={"batch": 3})
            made.train(3, 6)
        with (other := training(of_stages=of_stages, **LAYOUTS[number - 1 - of_stages])).pipe:
            torch.manual_seed(123)  # another state of the generator, which loading has to replace
            found = other.load(folder)
            assert (found.step, found.data) == (3, {"batch": 3})
            other.train(3, 6)
            plain.assert_same(other.state(), made.state())


@pytest.mark.parametrize("of_stages", [False, True])
def test_the_optimizers_of_stages_and_one_over_all_have_the_same_files(tmp_path, of_stages):
    with (made := training(of_stages=of_stages)).pipe, (other := training(of_stages=not of_stages)).pipe:
        made, other = made._replace(scheduler=None), other._replace(scheduler=None)
        made.train(0, 2)
        made.save(tmp_path, 2)
        other.load(tmp_path)
        plain.assert_same(other.state(), made.state())


def test_a_plain_module_is_saved_and_loaded_like_its_pipeline(tmp_path):
    with (made := training()).pipe:
        made.train(0, 3)
        made.save(tmp_path / "pipe", 3)
        kept: dict[str, Any] = {"step": 3, "scheduler": made.scheduler}
        own = pipepart.save(tmp_path / "module", made.pipe.module, made.optimizer, **kept)
        wanted = made.state()
    paths = tmp_path / "pipe" / "latest", own
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in paths)
    assert one == two
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    pipepart.load(own, module, optimizer, scheduler=scheduler)
    assert scheduler.milestones == {2: 1, 4: 1}
    assert scheduler.last_epoch == 3
    found = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    plain.assert_same(found, wanted)


def test_groups_of_parameters_may_be_in_another_order(tmp_path):
    def grouped(module: torch.nn.Module, swapped: bool) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        decayed = {"params": [one for name, one in named if "weight" in name], "weight_decay": 0.1}
        free = {"params": [one for name, one in named if "bias" in name][::-1], "lr": 0.3}
        return torch.optim.SGD([free, decayed] if swapped else [decayed, free], lr=0.1, momentum=0.9)

    one, other = model(), model()
    optimizers = grouped(one, False), grouped(other, True)
    for number in range(2):
        one(batch(number)[0]).sum().backward()
        optimizers[0].step()
    optimizers[0].param_groups[1]["lr"] = 0.7
    pipepart.save(tmp_path, one, optimizers[0], step=1)
    pipepart.load(tmp_path, other, optimizers[1])
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.7, 0.1]
    for name, parameter in other.named_parameters():
        wanted = optimizers[0].state[one.get_parameter(name)]["momentum_buffer"]
        assert optimizers[1].state[parameter]["momentum_buffer"].equal(wanted)


def test_state_keeps_its_dtype_beside_parameters_of_another(tmp_path):
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = torch.nn.Linear(3, 3).to(torch.bfloat16)
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    (module, optimizer), (other, loaded) = made(), made()
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    pipepart.save(tmp_path, module, optimizer, step=0)
    pipepart.load(tmp_path, other, loaded)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert one.equal(two)
        assert loaded.state[two]["momentum_buffer"].equal(optimizer.state[one]["momentum_buffer"])


def test_a_weight_saved_once_loads_into_layers_that_do_not_share_it(tmp_path):
    tied, free = model(), model(tied=False)
    pipepart.save(tmp_path, tied, step=0)
    pipepart.load(tmp_path, free)
    last = free.get_parameter("7.weight")
    assert last is not free.get_parameter("0.weight")
    assert last.equal(tied.get_parameter("0.weight"))
    with torch.no_grad():
        last.add_(1)
    pipepart.save(tmp_path, free, step=1)
    with pytest.raises(ValueError, match=r"saved apart are 0\.weight and 7\.weight"):
        pipepart.load(tmp_path, tied)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_scaler_and_random_generators_are_restored(tmp_path):
    module = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    pipepart.save(tmp_path, module, step=0, scaler=scaler)
    drawn = draws()
    other = torch.amp.GradScaler("cpu")
    pipepart.load(tmp_path, module, scaler=other)
    assert other.state_dict() == scaler.state_dict()
    assert draws() == drawn
    pipepart.load(tmp_path, module, random=False)
    assert draws() != drawn


class Renewed(torch.nn.Linear):
    """Converts states of its first version, as BatchNorm and others of torch do; has attributes as a pipeline has."""

    _version = 2
    optimizers = 3

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.module = torch.nn.Linear(2, 2)
        self.copy = self.module  # a second path to the same tensors

    def meet(self) -> None:
        raise AssertionError

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:  # type: ignore[override]
        if local_metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


def test_a_checkpoint_is_of_the_newest_version_of_a_layer_and_attributes_of_a_module_are_its_own(
    tmp_path: Path,
) -> None:
    one, other = Renewed(), Renewed()
    pipepart.save(tmp_path, one, step=0)
    pipepart.load(tmp_path, other)
    plain.assert_same(other.state_dict(), one.state_dict())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.StepLR(optimizer, 2)], [3]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, (0.9, 0.99), amsgrad=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "tensor": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.1), foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3),
}


def taught(name: str, named: bool) -> tuple[nn.Module, Any, Any]:
    """Return a model with an optimizer, and a scheduler if ``name`` is that of one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["adam"])(
        module.named_parameters() if named else module.parameters()
    )
    return module, optimizer, SCHEDULERS[name](optimizer) if name in SCHEDULERS else None


def teach(module: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    """Take some steps; return their learning rates."""
    x, rates = torch.linspace(-1, 1, 12, dtype=torch.double).reshape(4, 3), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("name", "named"), [*((name, False) for name in (*OPTIMIZERS, *SCHEDULERS)), ("adam", True)]
)
def test_optimizers_and_schedulers_go_on(tmp_path: Path, name: str, named: bool, steps: int) -> None:
    """Also at their start, where the best of a plateau is infinite."""
    one, other = taught(name, named), taught(name, named)
    teach(*one, steps)
    pipepart.save(tmp_path, *one[:2], step=steps, scheduler=one[2])
    pipepart.load(tmp_path, *other[:2], scheduler=other[2])
    assert teach(*other, 5) == teach(*one, 5)
    plain.assert_same(other[0].state_dict(), one[0].state_dict())


def test_schedulers_of_stages_that_are_equal_load_into_another_number(tmp_path: Path) -> None:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])

    def per_layer(layers: list[Any]) -> tuple[list[Any], list[Any]]:
        optimizers = [torch.optim.SGD(nn.ModuleList(layer).parameters(), 0.1) for layer in layers]
        return optimizers, [lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]

    three = per_layer([[module[0]], [module[1]], [module[2]]])
    two = per_layer([[module[0], module[1]], [module[2]]])
    for optimizer, scheduler in zip(*three, strict=True):
        optimizer.step()
        scheduler.step()
    pipepart.save(tmp_path, module, three[0], step=1, scheduler=three[1])
    pipepart.load(tmp_path, module, two[0], scheduler=two[1])
    assert [scheduler.last_epoch for scheduler in two[1]] == [1, 1]
    one = per_layer([list(module)])
    pipepart.save(tmp_path / "one", module, one[0], step=1, scheduler=one[1])
    pipepart.load(tmp_path / "one", module, two[0], scheduler=two[1])
    three[1][2].step()
    pipepart.save(tmp_path, module, three[0], step=2, scheduler=three[1])
    with pytest.raises(ValueError, match="has 3 schedulers with different states, and 2 are to be loaded"):
        pipepart.load(tmp_path, module, two[0], scheduler=two[1])
