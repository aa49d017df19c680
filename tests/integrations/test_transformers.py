"""The Trainer over a pipeline reports and saves what the plain Trainer does on the same batches."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipepart

pytestmark = pytest.mark.usefixtures("short_profiles")

STEPS = 4


@functools.cache
def imported() -> tuple[Any, Any, Any]:
    """Return transformers, the example and the integration, which every process would import to collect tests."""
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.logging.set_verbosity_error()
    names = ("examples.transformers_trainer", "pipepart.integrations.transformers")
    return transformers, *map(import_module, names)  # type: ignore[return-value]


def model() -> Any:
    """The model of the example without dropout, which a pipeline draws in another order."""
    torch.manual_seed(0)
    made = imported()[1].build()
    for part in made.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return made


@functools.cache
def plan() -> pipepart.Plan:
    _, example, _ = imported()
    text = example.data()
    sample = example.collate([text[index] for index in range(4)])
    with pipepart.Pipeline.auto(model(), sample, devices=2, schedule="1f1b", micro_batches=2) as pipe:
        return pipe.plan


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, words = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = len(words) if num_items_in_batch is None else num_items_in_batch
    return torch.nn.functional.cross_entropy(logits, words, label_smoothing=0.1, reduction="sum") / count


def trainer_of(folder: Path, piped: bool, **settings: Any) -> Any:
    """A Trainer of the example's model, with or without a pipeline."""
    transformers, example, integration = imported()
    text = example.data()
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    loss, counted = options.pop("compute_loss_func", None), options.pop("counted", True)
    bases = options.pop("bases", ())
    trained = model()
    arguments: dict[str, Any] = {
        "args": transformers.TrainingArguments(str(folder), **options),
        "data_collator": example.collate,
        "train_dataset": torch.utils.data.Subset(text, range(64)),
        "eval_dataset": torch.utils.data.Subset(text, range(64, 74)),
        "compute_metrics": accuracy,
        "compute_loss_func": loss,
    }
    base = integration.PipelineTrainer if piped else transformers.Trainer
    kind: Any = type("Subclass", (*bases, base), {})
    trainer = kind(pipepart.Pipeline(trained, plan()) if piped else trained, **arguments)
    trainer.model_accepts_loss_kwargs &= counted  # otherwise each loss is a mean, and steps are averaged
    return trainer


class TwiceTheLoss:
    """What a subclass of the Trainer may do with the loss of the model."""

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)  # type: ignore[misc]
        return (2 * loss, outputs) if return_outputs else 2 * loss


def accuracy(predictions: Any) -> dict[str, float]:
    right = predictions.predictions.argmax(-1)[:, :-1] == predictions.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "seen": float(right.size)}


def logged(trainer: Any) -> list[dict[str, float]]:
    """What was logged at each step, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_seen")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history[:-1]]


def assert_alike(found: Any, expected: Any) -> None:
    """Assert that two Trainers have logged the same numbers and ended with the same parameters, up to rounding."""
    assert [list(entry) for entry in logged(found)] == [list(entry) for entry in logged(expected)]
    for one, other in zip(logged(found), logged(expected), strict=True):
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-5, atol=1e-6)
        assert "loss" not in one or abs(one["loss"] - other["loss"]) <= 1e-6 * other["loss"]
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"compute_loss_func": smoothed, "max_steps": 2}, marks=pytest.mark.slow),
        {"bases": (TwiceTheLoss,), "max_steps": 1, "eval_strategy": "no"},
        pytest.param({"counted": False, "max_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=["own loss", "loss of the Trainer", "loss of a subclass", "mean over steps"],
)
def test_losses_metrics_and_parameters_are_those_of_the_plain_trainer(tmp_path, settings):
    found, expected = (trainer_of(tmp_path / str(piped), piped, **settings) for piped in (True, False))
    for trainer in (found, expected):
        trainer.train()
    assert len([entry for entry in logged(found) if "loss" in entry]) == settings.get("max_steps", STEPS)
    assert_alike(found, expected)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.slow
def test_autocast_of_the_trainer_holds_in_stages(tmp_path):
    found, expected, single = (
        trainer_of(tmp_path / str(index), piped, max_steps=2, bf16=bf16)
        for index, (piped, bf16) in enumerate([(True, True), (False, True), (False, False)])
    )
    for trainer in (found, expected, single):
        trainer.train()
    ours, theirs, without = (
        [e["loss"] for e in logged(one) if "loss" in e] for one in (found, expected, single)
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[0] != pytest.approx(without[0], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=2e-3)  # bfloat16 rounds the sums of micro-batches


@pytest.mark.parametrize("scaled", [True, False])
def test_a_user_says_whether_losses_are_scaled_for_accumulation(tmp_path, scaled):
    def trained(piped: bool) -> Any:
        trainer = trainer_of(tmp_path / str(piped), piped, max_steps=1, eval_strategy="no")
        trainer.loss_is_scaled_for_ga = scaled
        trainer.train()
        return trainer

    assert_alike(trained(True), trained(False))


class Averaged(torch.optim.SGD):
    """An optimizer with other weights for evaluation, as those without a schedule have; here it counts only."""

    trained = 0

    def train(self) -> None:
        self.trained += 1

    def eval(self) -> None:
        pass


def test_an_optimizer_is_told_that_it_trains(tmp_path):
    trainer = trainer_of(tmp_path, True, max_steps=2, eval_strategy="no")
    optimizer = trainer.optimizer = Averaged(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert optimizer.trained == 4  # two batches each step


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(imported()[2], "under_torchrun", lambda: True)
    with pytest.raises(ValueError, match="for one process"):
        trainer_of(tmp_path, True)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"label_smoothing_factor": 0.1}, "compute_loss_func"),
        ({"torch_compile": True}, "compile=True to Pipeline"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_a_pipeline_would_ignore_is_refused(tmp_path, option, says):
    with pytest.raises(ValueError, match=says):
        trainer_of(tmp_path, True, **option)


def test_training_goes_on_from_a_checkpoint_and_the_model_is_loaded_without_a_pipeline(tmp_path):
    whole = trainer_of(tmp_path / "whole", True)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    whole.save_model(tmp_path / "model")
    again = type(whole.model).from_pretrained(tmp_path / "model")
    found = whole.model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in again.state_dict().items())
