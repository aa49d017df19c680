"""What each of two hosts runs: trains a model whose messages take most of the step, and prints what came out."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

import pipepart
from pipepart import Cluster, Pipeline
from pipepart.ranks import under_torchrun

WIDTH, SAMPLES, PARTS, STEPS = 8192, 1024, 8, 6


def model() -> nn.Sequential:
    """Layers that make large messages of little work."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16))


def main() -> None:
    """Train, on one process or on those of torchrun, and print losses, parameters and the bandwidth."""
    torch.set_num_threads(1)
    torch.manual_seed(2)
    x, y = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)
    loss_fn = nn.MSELoss()
    cluster = Cluster.of_ranks() if under_torchrun() else Cluster.virtual(2)
    if os.environ.get("RANK", "0") == "0":
        profile = pipepart.profile(model(), x, target=y, loss_fn=loss_fn, micro_batches=PARTS, seconds=2.0)
        # One direction at a time: where both are busy, acknowledgements of one wait behind messages of the other.
        plan = pipepart.plan(profile, cluster, schedule="gpipe", cut_before=["2"], recompute="never")
        texts = [plan.model_dump_json()]
    else:
        texts = [""]
    if under_torchrun():
        torch.distributed.broadcast_object_list(texts)
    plan = pipepart.Plan.model_validate_json(texts[0])
    with Pipeline(model(), plan, loss_fn) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, target=y)))
            optimizer.step()
        state = pipe.full_state_dict()
    said = {
        "losses": losses,
        "sums": {name: float(value.double().sum()) for name, value in state.items()},
        "bandwidth": plan.cluster.link.bandwidth,
    }
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
