"""Trains a small GPT-2 on text that comes with Python. ``transformers_finetune.py`` does so in stages."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT, BATCH, STEPS = 48, 8, 40


def text() -> Tensor:
    """What ``help("topics")`` shows, as bytes."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def sample(data: Tensor) -> dict[str, Any]:
    """Some stretches of a text, as the arguments of the model."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1))
    ids = data[starts + torch.arange(CONTEXT)]
    return {"input_ids": ids, "labels": ids}


def main() -> int:
    """Train; return 0 if the loss has fallen as it should."""
    torch.manual_seed(0)
    data = text()
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
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**sample(data)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(f"loss {losses[-1]:.3f}")
    return int(losses[-1] > 3.8)


if __name__ == "__main__":
    sys.exit(main())
