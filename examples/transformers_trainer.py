"""Trains a small GPT-2 with the ``Trainer`` of transformers, in two stages."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import pipepart
from pipepart.integrations.transformers import PipelineTrainer

CONTEXT, BATCH, STEPS = 48, 8, 40


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
