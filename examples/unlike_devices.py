"""Trains on two devices, one half as fast: compares an even cut of the layers with the cut planned by pipepart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import pipepart
from pipepart.reporting import show, stage_table

WIDTH, BLOCKS, BATCH, MICRO_BATCHES, STEPS = 384, 12, 512, 8, 5


def network() -> nn.Sequential:
    """Return twelve equal blocks and a classifier."""
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def model() -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
    """Return what ``pipepart check examples/unlike_devices.py:model`` tries: model, sample, target and loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return network(), x, torch.randint(10, (BATCH,), generator=generator), nn.CrossEntropyLoss()


def main() -> int:
    """Train under both plans; return 0 if the planned cut is predicted to be faster."""
    torch.manual_seed(0)
    net, x, y, loss_fn = model()
    profile = pipepart.profile(net, x, target=y, loss_fn=loss_fn, micro_batches=MICRO_BATCHES, threads=1)
    # An emulated device of half the speed waits after each action for as long as the action took.
    cluster = pipepart.Cluster.virtual(2, speed=[1.0, 0.5], threads=1)

    halves = planned(profile, cluster, cut_before=[f"{BLOCKS // 2}.0"])
    best = planned(profile, cluster)
    show(stage_table(halves), stage_table(best))
    seconds = [trained(net, plan, x, y, loss_fn) for plan in (halves, best)]
    for name, plan, measured in zip(("halves", "planned"), (halves, best), seconds, strict=True):
        predicted = plan.predicted.step_seconds
        print(f"{name:8} predicted {1e3 * predicted:6.1f} ms a step, measured {1e3 * measured:6.1f} ms")
    return int(best.predicted.step_seconds >= halves.predicted.step_seconds)


def planned(
    profile: pipepart.Profile, cluster: pipepart.Cluster, cut_before: Sequence[str] | None = None
) -> pipepart.Plan:
    """Plan two stages; `cut_before` names the layer that begins the second one, if it is not to be found."""
    return pipepart.plan(
        profile,
        cluster,
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        stages=2,
        cut_before=cut_before,
    )


def trained(net: nn.Module, plan: pipepart.Plan, x: Tensor, y: Tensor, loss_fn: nn.Module) -> float:
    """Train a few steps, and return the median seconds of a step."""
    with pipepart.Pipeline(net, plan, loss_fn) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        pipe.step(x, target=y)  # the first step warms up
        with pipe.trace() as trace:
            for _ in range(STEPS):
                optimizer.zero_grad()
                pipe.step(x, target=y)
                optimizer.step()
    return trace.median.makespan


if __name__ == "__main__":
    sys.exit(main())
