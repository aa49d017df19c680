from __future__ import annotations
import sys, time, traceback
import torch, torch.distributed as dist
from torch import nn
import torch.nn.functional as F
from pipepart import Pipeline
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.ranks import ranks, Failed
from tests.distributed.training import drawn_batches, TIMEOUT
from tests.inside_stage.try2 import equal
from pipepart.dtensors import whole
from pipepart.capture import flatten

W = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.up, self.down = nn.Linear(W, 32), nn.Linear(32, W)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tp_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(W, W), Block(), Block(), nn.Linear(W, W), Block(), Block(), nn.Linear(W, W)
    ).double()


def tp(layers, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in layers.values():
        if isinstance(layer, Block):
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp_fsdp(layers, mesh):
    from torch.distributed.fsdp import fully_shard

    tp(layers, mesh)
    for layer in layers.values():
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["dp"])


def sp(layers, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        parallelize_module,
    )
    from torch.distributed.tensor import Shard, Replicate

    for layer in layers.values():
        if isinstance(layer, Block):
            parallelize_module(layer.norm, mesh["tp"], SequenceParallel(sequence_dim=0))
            parallelize_module(
                layer.norm,
                mesh["tp"],
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            )
            layer.norm._forward_pre_hooks.move_to_end(list(layer.norm._forward_pre_hooks)[-1], last=False)
            parallelize_module(
                layer,
                mesh["tp"],
                {
                    "up": ColwiseParallel(input_layouts=Shard(0)),
                    "down": RowwiseParallel(output_layouts=Replicate()),
                },
            )


def pipe_of(f, replicas=1, tensor=2, borders=(4,), m=4, schedule="1f1b", mod=None, chunks=1, **how):
    mod = mod or tp_model()
    plan = plan_by_hand(
        [n for n, _ in flatten(mod)],
        list(borders),
        micro_batches=m,
        schedule=schedule,
        replicas=replicas,
        chunks=chunks,
        tensor=tensor,
    )
    return Pipeline(mod, plan, nn.MSELoss(), parallelize=f, timeout=TIMEOUT, **how)


def run(f, replicas, tensor, borders, schedule, m, chunks=1, steps=3):
    out = []
    with pipe_of(f, replicas, tensor, borders, m, schedule, chunks=chunks) as pipe:
        opt = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for x, y in drawn_batches([8] * steps, width=W):
            opt.zero_grad()
            loss = pipe.step(x, target=y)
            g = {n: whole(p.grad).clone() for n, p in pipe.named_parameters()}
            places = {
                n: (str(getattr(p, "placements", "")), str(getattr(p.grad, "placements", "")))
                for n, p in pipe.named_parameters()
            }
            norm = pipe.clip_grad_norm_(0.1)
            opt.step()
            out.append((loss, g, norm, pipe.evaluate(x, target=y), places))
        x.requires_grad_()
        o = pipe(x)
        (o * y).sum().backward()
        out.append((o.detach(), x.grad.clone()))
        return out, pipe.full_state_dict(), [str(pipe.mesh)]


def plain(steps=3):
    mod = tp_model()
    opt = torch.optim.AdamW(mod.parameters(), lr=1e-2)
    out = []
    for x, y in drawn_batches([8] * steps, width=W):
        opt.zero_grad()
        loss = F.mse_loss(mod(x), y)
        loss.backward()
        g = {n: p.grad.clone() for n, p in mod.named_parameters()}
        norm = nn.utils.clip_grad_norm_(mod.parameters(), 0.1)
        opt.step()
        with torch.no_grad():
            e = F.mse_loss(mod(x), y)
        out.append((loss.detach(), g, norm, e))
    x.requires_grad_()
    o = mod(x)
    (o * y).sum().backward()
    out.append((o.detach(), x.grad.clone()))
    return out, mod.state_dict()


def compare(found, want):
    worst = 0
    (steps, state, _), (wsteps, wstate) = found, want
    for a, b in zip(steps[:-1], wsteps[:-1]):
        worst = max(
            worst,
            abs((a[0] - b[0]) / b[0]).item(),
            abs((a[2] - b[2]) / b[2]).item(),
            abs((a[3] - b[3]) / b[3]).item(),
        )
        worst = max([worst] + [((a[1][n] - b[1][n]).abs().max() / b[1][n].abs().max()).item() for n in a[1]])
    worst = max([worst] + [((state[n] - wstate[n]).abs().max()).item() for n in wstate])
    worst = max([worst] + [((p - q).abs().max()).item() for p, q in zip(steps[-1], wsteps[-1])])
    return worst


if __name__ == "__main__":
    import tests.inside_stage.try3 as here

    want = plain()
    for f, replicas, tensor, borders, schedule, m, chunks in (
        ("tp", 1, 2, (4,), "1f1b", 4, 1),
        ("tp", 1, 2, (4,), "zb-h1", 4, 1),
        ("tp", 1, 2, (2, 4, 5), "interleaved-1f1b", 4, 2),
        ("tp", 2, 2, (), "1f1b", 4, 1),
        ("tp", 1, 4, (), "1f1b", 4, 1),
        ("tp_fsdp", 2, 2, (), "1f1b", 5, 1),
        ("tp_fsdp", 1, 2, (4,), "zb-h1", 4, 1),
        ("sp", 1, 2, (4,), "zb-h1", 4, 1),
    ):
        t = time.time()
        team = ranks(4)
        try:
            b = team.outcomes(
                here.run, getattr(here, f), replicas, tensor, borders, schedule, m, chunks, seconds=60
            )
        except Exception as e:
            print(f, "RAISED", e)
            continue
        bad = [x for x in b if isinstance(x, Failed)]
        if bad:
            print(f, "FAILED", "\n".join(x.traceback[-2500:] for x in bad[:1]))
            team.kill()
            continue
        print(
            f,
            replicas,
            tensor,
            schedule,
            m,
            [compare(x, want) for x in b],
            "losses equal",
            all(x[0][i][0] == b[0][0][i][0] for x in b for i in range(3)),
            round(time.time() - t, 1),
            b[0][2],
            flush=True,
        )
        if f in ("sp", "tp_fsdp"):
            print(b[0][0][0][4])
    ranks(4).kill()
