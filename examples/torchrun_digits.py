"""Trains on handwritten digits under torchrun, and resumes from the last checkpoint after a process has failed.

::

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m examples.torchrun_digits run

    torchrun --standalone --nproc-per-node 4 -m examples.torchrun_digits run --replicas 2

Stop it at any moment, or kill one of its processes, and start it again with as many processes or fewer: it computes the
numbers of a run that nothing has disturbed. With ``--replicas 2`` two replicas of the model load a half of each
mini-batch each.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pipepart

BATCH = 128


def network() -> nn.Sequential:
    """Six blocks. The random numbers of their dropout are part of a checkpoint."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor]:
    """The images ``[1797, 64]`` and labels ``[1797]`` of scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images, dtype=torch.float32) / 16, torch.as_tensor(labels)


def main() -> None:
    """Train up to a number of steps, from the last checkpoint in the folder if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of the checkpoints, which all processes see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=1, help="of the model, with processes of their own")
    arguments = parser.parse_args()

    torch.manual_seed(0)  # the same initial values on every rank
    x, y = digits()
    # Numbers depend on how a mini-batch is split, and on the order of sums: so both are fixed here, the cut is not.
    with pipepart.Pipeline.auto(
        network(),
        x[:BATCH],
        target=y[:BATCH],
        loss_fn=nn.CrossEntropyLoss(),
        schedule="1f1b",
        micro_batches=4,
        replicas=arguments.replicas,
        timeout=300,  # a process that hangs, which torchrun does not see, is a failure as well
    ) as pipe:
        # Every rank of a replica loads the same samples. What shuffles them follows from the epoch, and so needs no
        # state. With a generator of its own, a loader that begins anew within an epoch takes no random number of the
        # dropout.
        parts, part = (1, 0) if pipe.mesh is None else (pipe.mesh.size(0), pipe.mesh.get_local_rank("dp"))
        sampler = DistributedSampler(TensorDataset(x, y), num_replicas=parts, rank=part)
        own = torch.Generator()
        loader = DataLoader(sampler.dataset, BATCH // parts, sampler=sampler, drop_last=True, generator=own)

        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        try:
            loaded = pipepart.load(arguments.folder, pipe, optimizer)
            step, epoch, seen = loaded.step, loaded.data["epoch"], loaded.data["batches"]
        except FileNotFoundError:  # the first start
            step, epoch, seen = 0, 0, 0
        say(f"{pipe} begins behind step {step}")
        while step < arguments.steps:
            sampler.set_epoch(epoch)
            for number, (images, labels) in enumerate(loader):
                if number < seen:
                    continue
                loss = pipe.step(whole(images, pipe.mesh), target=whole(labels, pipe.mesh))
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                step, seen = step + 1, number + 1
                if step % arguments.save_every == 0 or step == arguments.steps:
                    position = {"epoch": epoch, "batches": seen}
                    pipepart.save(arguments.folder, pipe, optimizer, step=step, data=position, keep=2)
                    say(f"step {step}: loss {float(loss):.4f}")
                if step == arguments.steps:
                    return
            epoch, seen = epoch + 1, 0


def whole(part: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the mini-batch of which each replica has loaded a part, in the order of one loader."""
    if mesh is None:
        return part
    parts = [torch.empty_like(part) for _ in range(mesh.size(0))]
    dist.all_gather(parts, part, group=mesh.get_group("dp"))
    return torch.stack(parts, 1).flatten(0, 1)  # a sampler gives the samples out in turns


def say(line: str) -> None:
    """Print a line, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
