from __future__ import annotations
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from pipepart import Pipeline
from tests.support.replicas import cut_replicas
from tests.support import plain
from tests.support.ranks import ranks
from tests.distributed.training import drawn_batches, TIMEOUT


def model():
    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.LayerNorm(6)]

    class Block(nn.Module):
        def __init__(self, s):
            super().__init__()
            self.a, self.b = s[0], s[2]

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    layers = [Block(l) if isinstance(l, nn.Sequential) else l for l in layers]
    return nn.Sequential(*layers).double()


def shard(layers, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        if not isinstance(layer, nn.LayerNorm):
            fully_shard(layer.a, mesh=mesh["dp"])
            fully_shard(layer, mesh=mesh["dp"])


def case(schedule, m, chunks, inside, steps=1):
    from pipepart.dtensors import whole

    borders = [4] if chunks == 1 else [2, 4, 6]
    pipe = cut_replicas(
        model(),
        borders,
        2,
        loss_fn=nn.MSELoss(),
        micro_batches=m,
        schedule=schedule,
        chunks=chunks,
        timeout=TIMEOUT,
        **({"parallelize": shard} if inside else {}),
    )
    out = {}
    with pipe:
        opt = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for x, y in drawn_batches([10] * steps, width=6):
            opt.zero_grad()
            out["loss"] = pipe.step(x, target=y)
            out["grads"] = {
                n: None if p.grad is None else whole(p.grad).clone() for n, p in pipe.named_parameters()
            }
            out["norm"] = pipe.clip_grad_norm_(0.1)
            opt.step()
        out["eval"] = pipe.evaluate(x, target=y)
        out["kinds"] = {n: type(p).__name__ for n, p in pipe.named_parameters()}
        out["state"] = pipe.full_state_dict()
        out["out"] = pipe(x).detach()
    return out


if __name__ == "__main__":
    team = ranks(4)
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)):
        for m in (4, 5) if chunks == 1 else (4,):
            t = time.time()
            a = team.run(case, schedule, m, chunks, False, 2)
            b = team.run(case, schedule, m, chunks, True, 2)
            for r in range(4):
                same = {k: torch.equal(a[r]["grads"][k], b[r]["grads"][k]) for k in a[r]["grads"]}
                st = {k: torch.equal(a[r]["state"][k], b[r]["state"][k]) for k in a[r]["state"]}
                d = max((a[r]["grads"][k] - b[r]["grads"][k]).abs().max().item() for k in same)
                print(
                    schedule,
                    m,
                    r,
                    all(same.values()),
                    d,
                    all(st.values()),
                    a[r]["loss"] == b[r]["loss"],
                    a[r]["norm"].item() - b[r]["norm"].item(),
                    a[r]["eval"] == b[r]["eval"],
                    torch.equal(a[r]["out"], b[r]["out"]),
                    sum(v == "DTensor" for v in b[r]["kinds"].values()),
                    len(same),
                )
            print(round(time.time() - t, 1), "s")
    team.kill()
