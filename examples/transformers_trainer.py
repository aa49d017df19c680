"""Trains a small GPT-2 with ``transformers.Trainer`` in two stages: a subclass hands its batches to a pipeline."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pipepart

CONTEXT, BATCH, STEPS = 48, 8, 40


class PipelineTrainer(Trainer):
    """A Trainer whose steps, evaluations and predictions go through a pipeline.

    Args:
        pipe: the pipeline of the model to train.
        options: those of ``transformers.Trainer``, without ``model``.
    """

    def __init__(self, pipe: pipepart.Pipeline, **options: Any) -> None:
        # With a device map the Trainer leaves a model where it is: on the devices of its stages.
        pipe.module.hf_device_map = {name: str(tensor.device) for name, tensor in pipe.named_parameters()}  # type: ignore
        super().__init__(model=pipe.module, **options)
        del pipe.module.hf_device_map
        self.pipe = pipe
        if self.label_smoother is not None:
            raise ValueError("pass compute_loss_func=... in place of label_smoothing_factor")

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of a batch; return its loss, weighted as the Trainer weighs it."""
        if self.compute_loss_func is not None:  # differentiates the output of the pipeline
            return super().training_step(self.pipe, inputs, num_items_in_batch)  # type: ignore[arg-type]
        self.pipe.train()
        inputs, weight = self._prepare_inputs(inputs), 1 / self.current_gradient_accumulation_steps
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs, weight = {**inputs, "num_items_in_batch": num_items_in_batch}, 1.0
        loss = self.pipe.step(**inputs, scaler=self.accelerator.scaler, loss_weight=weight)
        return loss * weight

    def prediction_step(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return loss, predictions and labels of a batch."""
        return super().prediction_step(self.pipe, *args, **options)  # type: ignore[arg-type]


def build() -> GPT2LMHeadModel:
    """A GPT-2 that reads bytes."""
    config = GPT2Config(
        n_layer=3,
        n_embd=48,
        n_head=4,
        n_positions=CONTEXT,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def data() -> Dataset[Any]:
    """What ``help("topics")`` shows, as bytes, cut into stretches."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return TensorDataset(text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT))


def collate(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    """Some stretches of a text, as the arguments of the model."""
    ids = torch.stack([ids for (ids,) in samples])
    return {"input_ids": ids, "labels": ids}


def main() -> int:
    """Train; return 0 if the loss has fallen as it should."""
    torch.manual_seed(0)
    text = data()
    sample = collate([text[index] for index in range(BATCH)])
    pipe = pipepart.Pipeline.auto(build(), sample, devices=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=5e-3,
            logging_steps=10,
            report_to=[],
        )
        trainer = PipelineTrainer(pipe, args=arguments, train_dataset=text, data_collator=collate)
        trainer.train()
        trainer.save_model()
        again = GPT2LMHeadModel.from_pretrained(folder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[-1]:.3f}, {again.num_parameters()} parameters saved")
    return int(losses[-1] > 3.8)


if __name__ == "__main__":
    sys.exit(main())
