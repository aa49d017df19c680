"""A module of Lightning over a pipeline logs and ends with what the same module does without one."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart.integrations.lightning import PipelineSteps

pytestmark = [
    pytest.mark.usefixtures("short_profiles"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WIDTH = 6
BATCH = 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def loader() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6 * BATCH, WIDTH, dtype=torch.double, generator=generator)
    y = torch.randint(3, (6 * BATCH,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH)


@functools.cache
def modules() -> Any:
    """Return the Trainer, a module, and one over a pipeline; on top, every process that collects would import them."""
    lightning: Any = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Plain(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []
            self.seen: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("validation", nn.functional.cross_entropy(self.model(x), y))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def on_validation_epoch_end(self) -> None:
            self.seen.append(float(self.trainer.callback_metrics["validation"]))

    class Piped(PipelineSteps, Plain):
        def __init__(self, pipe: pipepart.Pipeline) -> None:
            super().__init__(pipe, pipe.module)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.pipeline_step(x, target=y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("validation", self.pipe.evaluate(x, target=y))

    return SimpleNamespace(Trainer=lightning.Trainer, Plain=Plain, Piped=Piped)


def pipeline(model: nn.Module) -> pipepart.Pipeline:
    x, y = next(iter(loader()))
    how: dict[str, Any] = {"devices": 2, "schedule": "1f1b", "micro_batches": 2}
    return pipepart.Pipeline.auto(model, x, target=y, loss_fn=nn.CrossEntropyLoss(), **how)


def trainer(folder: Path, **options: Any) -> Any:
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **dict.fromkeys(silent, False)}
    return modules().Trainer(**{**settings, "default_root_dir": folder, **options})


def trained(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Train the module with and without a pipeline; options are functions that make those of the Trainer."""
    with pipeline(network()) as pipe:
        ours, expected = modules().Piped(pipe), modules().Plain(network())
        for module in (ours, expected):
            settings = {name: make() for name, make in options.items()}
            trainer(folder, **settings).fit(module, loader(), loader())
    torch.testing.assert_close(ours.losses, expected.losses, rtol=1e-7, atol=0)
    return ours, expected


def averages() -> list[Any]:
    """A callback that averages weights in a copy of the module."""
    from pytorch_lightning.callbacks import StochasticWeightAveraging

    return [StochasticWeightAveraging(0.1, 1)]


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": lambda: 4, "gradient_clip_val": lambda: 0.1}, {"callbacks": averages}],
    ids=["plain", "accumulated and clipped", "averaged"],
)
def test_losses_metrics_and_parameters_are_those_of_lightning(tmp_path, options):
    ours, expected = trained(tmp_path, **options)
    assert len(ours.losses) == 12
    torch.testing.assert_close(ours.losses, expected.losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(ours.seen, expected.seen, rtol=1e-9, atol=0)
    torch.testing.assert_close(ours.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


def test_an_optimizer_may_run_a_batch_several_times(tmp_path, monkeypatch):
    """LBFGS does, and its gradients are those of the last time alone."""

    def lbfgs(module: Any) -> Any:
        return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    monkeypatch.setattr(modules().Plain, "configure_optimizers", lbfgs)
    ours, expected = trained(tmp_path, max_epochs=lambda: 1)
    for actual, wanted in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-6, atol=1e-9)


def test_training_goes_on_from_a_checkpoint_of_either(tmp_path):
    whole = modules().Plain(network())
    trainer(tmp_path).fit(whole, loader())
    for make in (modules().Plain, lambda model: modules().Piped(pipeline(model))):
        saving = trainer(tmp_path, max_epochs=1)
        saving.fit(make(network()), loader())
        saving.save_checkpoint(tmp_path / "saved.ckpt")
        second = modules().Piped(pipeline(network()))
        trainer(tmp_path).fit(second, loader(), ckpt_path=tmp_path / "saved.ckpt")
        torch.testing.assert_close(second.losses, whole.losses[6:], rtol=1e-9, atol=0)


def test_what_cannot_work_is_refused(tmp_path):
    module = modules().Piped(pipeline(network()))
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"call self\.pipe\.step"):
        trainer(tmp_path).fit(module, loader())

    class Several:
        world_size = 2

    module._trainer = Several()
    with pytest.raises(ValueError, match=r"Trainer\(devices=1\)"):
        PipelineSteps.pipeline_step(module, torch.ones(1))
