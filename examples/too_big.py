"""Plans a model that is too big for its devices, applies a suggestion of the error, and trains within the memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import pipepart
from pipepart.reporting import memory_table, show

WIDTH, BLOCKS, BATCH, MICRO_BATCHES = 128, 6, 256, 4
MEMORY = "4.5MiB"


def model() -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
    """Return what ``pipepart check examples/too_big.py:model`` tries: model, sample, target and loss."""
    generator = torch.Generator().manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    )
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(10, (BATCH,), generator=generator)
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10)), x, y, nn.CrossEntropyLoss()


def main() -> int:
    """Plan, change what has to change, train; return 0 if the model fits in the end."""
    torch.manual_seed(0)
    net, x, y, loss_fn = model()
    profile = pipepart.profile(
        net, x, target=y, loss_fn=loss_fn, micro_batches=[MICRO_BATCHES, 4 * MICRO_BATCHES], optimizer="sgd"
    )
    request: dict[str, Any] = {
        "profile": profile,
        "cluster": pipepart.Cluster.virtual(2, memory=MEMORY),
        "schedule": "1f1b",
        "micro_batches": MICRO_BATCHES,
        "recompute": "never",
    }
    try:
        pipepart.plan(**request)
    except pipepart.InfeasiblePlanError as error:
        print(f"{error}\n")
        # Of the changes that fit, one that keeps the devices, the schedule and the size of the micro-batches.
        change = next(each for each in error.suggestions if set(each.options) == {"recompute"})
    else:
        return 1
    print(f"Planned again with {change.change}.\n")
    plan = pipepart.plan(**{**request, **change.options})
    show(memory_table(plan))

    # Strict devices count every tensor, and raise torch.OutOfMemoryError above their limit, as a GPU does.
    with pipepart.Pipeline(net, plan, loss_fn, strict=True) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        first = pipe.step(x, target=y).item()
        optimizer.step()
        optimizer.zero_grad()
        last = pipe.step(x, target=y).item()
        used = {device: memory.peak for device, memory in pipe.memory().items()}
    print(f"loss {first:.4f}, then {last:.4f}")
    for device, peak in used.items():
        print(f"{device} had {peak / 2**20:.2f} MiB at its peak, of {MEMORY}")
    return int(not last < first)


if __name__ == "__main__":
    sys.exit(main())
