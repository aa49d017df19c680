"""Fine-tunes LoRA adapters (peft) of a frozen bfloat16 model on two devices with different memory and speed."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import pipepart
from pipepart.reporting import memory_table, show

CONTEXT, BATCH, MICRO_BATCHES, STEPS = 32, 8, 4, 21
MEMORY, SPEED = ["6MiB", "4MiB"], [1.0, 0.5]


def base() -> LlamaForCausalLM:
    """Return the model to adapt, in bfloat16; random values stand for pretrained ones."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def sample() -> dict[str, Any]:
    """Return stretches of the text of ``help("topics")`` as the arguments of the model."""
    from pydoc_data.topics import topics

    data = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    ids = data[torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)]
    return {"input_ids": ids, "labels": ids}


def main() -> int:
    """Plan, train and save the adapters; return 0 if the loss falls and the adapters load into the base model."""
    torch.manual_seed(0)
    model = base()
    cluster = pipepart.Cluster.virtual(2, memory=MEMORY, speed=SPEED)
    everything = pipepart.profile(model, sample(), micro_batches=MICRO_BATCHES, optimizer="adamw")
    try:
        pipepart.plan(everything, cluster, schedule="1f1b")
        return 1
    except pipepart.InfeasiblePlanError as error:
        print(f"All parameters: {error.reason}.\n")

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    profile = pipepart.profile(adapted, sample(), micro_batches=MICRO_BATCHES, optimizer="adamw")
    plan = pipepart.plan(profile, cluster, schedule="1f1b")
    show(memory_table(plan))

    with pipepart.Pipeline(adapted, plan) as pipe:
        trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        batch, losses = sample(), list[float]()
        for step in range(STEPS):
            losses.append(pipe.step(**batch).item())
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"step {step}: loss {losses[-1]:.3f}")
    print(f"loss {losses[-1]:.3f}")

    # The pipeline trains the parameters of `adapted` itself, so peft saves them as ever.
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        adapted.save_pretrained(folder)
        torch.manual_seed(0)
        again = PeftModel.from_pretrained(base(), folder)
        difference = abs(again(**batch).loss - adapted.eval()(**batch).loss).item()
    print(f"{len(trained)} adapter tensors saved; loss after loading differs by {difference:g}")
    return int(losses[-1] > 0.9 * losses[0] or difference > 0)


if __name__ == "__main__":
    sys.exit(main())
