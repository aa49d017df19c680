"""`python -m benchmarks.estimates`: how near times that are estimated from a roofline are to measured ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import pipepart
from pipepart import Cluster, Plan, Profile

_LARGE = 0.05  # of the model's time: smaller layers do not decide where to cut


def perceptron() -> tuple[Any, ...]:
    """Linear layers of several widths."""
    widths = (64, 512, 512, 1024, 512, 512, 10)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(256, 64), torch.randint(10, (256,)), nn.CrossEntropyLoss()


def convolutions() -> tuple[Any, ...]:
    """A small convolutional network on pictures of 32 x 32."""
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    return model, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)), nn.CrossEntropyLoss()


def gpt2() -> tuple[Any, ...]:
    """GPT-2 with four blocks of width 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "vocab_size": 2000,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _language_model(GPT2LMHeadModel(GPT2Config(**settings, use_cache=False)))


def llama() -> tuple[Any, ...]:
    """Llama with four blocks of width 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    return _language_model(
        LlamaForCausalLM(LlamaConfig(**settings, num_attention_heads=4, vocab_size=2000, use_cache=False))
    )


def _language_model(model: nn.Module) -> tuple[Any, ...]:
    ids = torch.randint(2000, (8, 64))
    return model, {"input_ids": ids, "labels": ids}, None, None


MODELS: tuple[Callable[[], tuple[Any, ...]], ...] = (perceptron, convolutions, gpt2, llama)


def main(
    seconds: Annotated[float, typer.Option(help="Time to measure each model for.")] = 2.0,
    devices: Annotated[int, typer.Option(help="Devices to cut each model for.")] = 3,
) -> None:
    """Compare estimated and measured profiles of several models, and the plans made from them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = Table("model", "estimate s", "total", "correlation", "share of a layer", "bottleneck")
    for make in MODELS:
        model, sample, target, loss_fn = make()
        options: dict[str, Any] = {"target": target, "loss_fn": loss_fn, "micro_batches": 4, "threads": 1}
        measured = pipepart.profile(model, sample, **options, seconds=seconds)
        start = time.process_time()
        estimated = pipepart.profile(model, sample, **options, measure=False)
        took = time.process_time() - start
        table.add_row(make.__name__, f"{took:.1f}", *_compared(estimated, measured, devices))
    console = Console()
    console.print(table)
    console.print(
        "total: estimated over measured time of the model. share of a layer: of the model's time, estimated over "
        f"measured, for layers of at least {_LARGE:.0%}. bottleneck: the largest stage of the plan from estimates, in "
        "measured times, over that of the plan from measured times."
    )


def _compared(estimated: Profile, measured: Profile, devices: int) -> list[str]:
    found, truth = (
        np.array([cost.seconds for cost in made.costs[0].layers]) for made in (estimated, measured)
    )
    shares = (found / found.sum() / (truth / truth.sum()))[truth >= _LARGE * truth.sum()]
    plans = [
        pipepart.plan(made, Cluster.virtual(devices), schedule="1f1b", allow_split_ties=True)
        for made in (estimated, measured)
    ]
    ours, best = (_bottleneck(plan, truth) for plan in plans)
    return [
        f"{found.sum() / truth.sum():.2f}",
        f"{np.corrcoef(found, truth)[0, 1]:.2f}",
        f"{shares.min():.2f} to {shares.max():.2f}",
        f"{ours / best:.2f}",
    ]


def _bottleneck(plan: Plan, seconds: Any) -> float:
    ends = np.cumsum([len(stage.layers) for stage in plan.stages])
    return max(part.sum() for part in np.split(seconds, ends[:-1]))


if __name__ == "__main__":
    typer.run(main)
