"""Trains a residual network on handwritten digits, cut into two stages on two virtual devices of this CPU."""

from __future__ import annotations

import copy
import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart.reporting import drawn_timeline, measured_against_plan, show, stage_table

BATCH = 256
MICRO_BATCHES = 8
EPOCHS = 10
WANTED_ACCURACY = 0.95


class Residual(nn.Module):
    """Two convolutions whose result is added to what went in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


def network() -> nn.Sequential:
    """Sixteen layers for images of 8 x 8 pixels: the front does most of the work, the back holds most weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        Residual(32),
        Residual(32),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        Residual(64),
        Residual(64),
        Residual(64),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 10),
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and as many again held out (a fifth): 1,797 digits that people wrote."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(x) // 5], order[len(x) // 5 :]
    return x[train], y[train], x[held_out], y[held_out]


def model() -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
    """What ``pipepart profile examples/digits.py:model`` measures: a model, a sample, a target and a loss."""
    x, y, _, _ = digits()
    return network(), x[:BATCH], y[:BATCH], nn.CrossEntropyLoss()


def main() -> int:
    """Profiles, plans, trains and compares; 0 when the held-out digits are read well enough."""
    torch.manual_seed(0)
    x, y, x_held_out, y_held_out = digits()
    net, loss_fn = network(), nn.CrossEntropyLoss()

    # Pipeline.auto does the next three in one line; apart, there is something to look at in between.
    profile = pipepart.profile(
        net, x[:BATCH], target=y[:BATCH], loss_fn=loss_fn, micro_batches=MICRO_BATCHES, optimizer="adamw"
    )
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2), schedule="1f1b", stages=2)
    pipe = pipepart.Pipeline(net, plan, loss_fn=loss_fn)

    one_device, pipeline = step_seconds_of_both(net, pipe, x[:BATCH], y[:BATCH], loss_fn)
    print(
        f"One device {1e3 * one_device:.0f} ms a step, two devices {1e3 * pipeline:.0f} ms, both measured:",
        end=" ",
    )
    print(f"{one_device / pipeline:.2f} times as fast\n")
    show(stage_table(plan), drawn_timeline(plan.simulate(), "Predicted timeline of one step"))
    print()

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    step_seconds: list[float] = []
    accuracy = 0.0
    with pipe:
        for epoch in range(1, EPOCHS + 1):
            losses = []
            for batch in torch.randperm(len(x)).split(BATCH):
                start = time.perf_counter()
                loss = pipe.step(x[batch], target=y[batch])
                if len(batch) == BATCH:
                    step_seconds.append(time.perf_counter() - start)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            scheduler.step()
            accuracy = held_out_accuracy(pipe, x_held_out, y_held_out)
            progress(epoch, statistics.mean(losses), accuracy)

    print()
    show(measured_against_plan(plan, step_seconds[2:]))
    print(f"Accuracy on {len(x_held_out)} held-out digits: {accuracy:.1%}")
    if accuracy < WANTED_ACCURACY:
        print(f"That is less than the {WANTED_ACCURACY:.0%} expected.", file=sys.stderr)
        return 1
    return 0


def step_seconds_of_both(
    net: nn.Module, pipe: pipepart.Pipeline, x: Tensor, y: Tensor, loss_fn: nn.Module, steps: int = 5
) -> tuple[float, float]:
    """Return median seconds of a step of the plain model on one device, and of the pipeline.

    Steps of both run in turn, so that a busy machine slows both. A virtual device has a share of the CPU's cores; the
    plain model gets the threads of one such device.
    """
    plain, seconds = copy.deepcopy(net), ([], [])
    for _ in range(2 + steps):
        start = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(pipe.plan.workers[0].threads or threads)
        loss_fn(plain(x), y).backward()
        torch.set_num_threads(threads)
        middle = time.perf_counter()
        pipe.step(x, target=y)
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)
    pipe.zero_grad()
    return statistics.median(seconds[0][2:]), statistics.median(seconds[1][2:])


def held_out_accuracy(pipe: pipepart.Pipeline, x: Tensor, y: Tensor) -> float:
    """The part of ``x`` that is read as ``y``."""
    pipe.eval()
    with torch.no_grad():
        right = (pipe(x).argmax(dim=1) == y).float().mean().item()
    pipe.train()
    return right


def progress(epoch: int, loss: float, accuracy: float) -> None:
    """One line that changes in a terminal, a line an epoch in a file."""
    line = f"epoch {epoch:>2} of {EPOCHS}   loss {loss:.4f}   held-out accuracy {accuracy:.1%}"
    if not sys.stdout.isatty():
        print(line, flush=True)
    else:
        print(f"\r\x1b[2K{line}", end="\n" if epoch == EPOCHS else "", flush=True)


if __name__ == "__main__":
    sys.exit(main())
