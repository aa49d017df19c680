from __future__ import annotations
import sys, time, tempfile
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
import pipepart
from pipepart import Pipeline
from tests.support.ranks import ranks, Failed
from tests.support.chains import plan_by_hand
from tests.distributed.training import drawn_batches, TIMEOUT
from tests.inside_stage.try2 import equal
from pipepart.dtensors import whole

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8); self.up = nn.Linear(8, 16); self.down = nn.Linear(16, 8)
    def forward(self, x, scale):
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.pos = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 8)
        if tied: self.head.weight = self.embed.weight
    def forward(self, x, scale=1.0):
        h = self.embed(x) + self.pos
        for b in self.blocks: h = b(h, scale)
        return self.head(h).tanh()

def make(tied=False):
    torch.manual_seed(0)
    return Model(tied).double()

def plan_of(tensor=1, replicas=2, schedule="1f1b"):
    x, y = drawn_batches([8], width=8)[0]
    mod = make()
    prof = pipepart.profile(mod, x, loss_fn=F.mse_loss, target=y, micro_batches=4, measure=False) if False else pipepart.profile(mod, x, loss_fn=F.mse_loss, target=y, micro_batches=4)
    return pipepart.plan(prof, pipepart.Cluster.virtual(4, threads=1), schedule=schedule, micro_batches=4, stages=4 // tensor // replicas, replicas=replicas, tensor=tensor)

def fsdp(layers, mesh):
    from torch.distributed.fsdp import fully_shard
    for name, l in layers.items():
        if isinstance(l, Block): fully_shard(l, mesh=mesh["dp"])
def fsdp_all(layers, mesh):
    from torch.distributed.fsdp import fully_shard
    for name, l in layers.items():
        fully_shard(l, mesh=mesh["dp"])
def tp(layers, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    for name, l in layers.items():
        if isinstance(l, Block): parallelize_module(l, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
def tp_embed(layers, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor import Replicate
    tp(layers, mesh)
    for name, l in layers.items():
        if name in ("embed", "head"): parallelize_module(l, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))

def run(plan, f, tied=False, sizes=(8, 7, 8)):
    out = []
    with Pipeline(make(tied), plan, F.mse_loss, parallelize=f, timeout=TIMEOUT) as pipe:
        opt = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for x, y in drawn_batches(sizes, width=8):
            opt.zero_grad()
            loss = pipe.step(x, target=y, scale=0.5)
            g = {n: None if p.grad is None else whole(p.grad).clone() for n, p in pipe.named_parameters()}
            opt.step()
            out.append((loss, g, pipe.evaluate(x, target=y)))
        kinds = {n: type(p).__name__ for n, p in pipe.named_parameters()}
        return out, pipe.full_state_dict(), kinds

def plain(tied=False, sizes=(8, 7, 8)):
    mod = make(tied); opt = torch.optim.AdamW(mod.parameters(), lr=1e-2); out = []
    for x, y in drawn_batches(sizes, width=8):
        opt.zero_grad(); loss = F.mse_loss(mod(x, scale=0.5), y); loss.backward()
        g = {n: p.grad.clone() for n, p in mod.named_parameters()}
        opt.step()
        with torch.no_grad(): out.append((loss.detach(), g, F.mse_loss(mod(x), y)))
    return out, mod.state_dict()

if __name__ == "__main__":
    import tests.inside_stage.try5 as here
    for name, f, tensor, replicas, sched, tied in [c for c in (("fsdp", "fsdp", 1, 2, "1f1b", False), ("fsdp_all", "fsdp_all", 1, 2, "zb-h1", False), ("tp", "tp", 2, 1, "1f1b", False), ("tp_embed", "tp_embed", 2, 1, "zb-h1", False), ("tied blocks", "fsdp", 1, 2, "1f1b", True), ("tied all", "fsdp_all", 1, 2, "1f1b", True), ("none", None, 1, 2, "1f1b", True)) if c[0] in (sys.argv[1:] or c[0])]:
        t = time.time(); team = ranks(4)
        plan = here.plan_of(tensor, replicas, sched)
        try: b = team.outcomes(here.run, plan, f and getattr(here, f), tied, seconds=60)
        except Exception as e: print(name, "RAISED", e); continue
        bad = [x for x in b if isinstance(x, Failed)]
        if bad: print(name, "FAILED", str(bad[0].error)[:400], "\n".join(x.traceback[-1500:] for x in bad[:1])); continue
        want = here.plain(tied)
        worst = 0
        for r in b:
            for (l, g, e), (wl, wg, we) in zip(r[0], want[0]):
                worst = max([worst, abs((l - wl) / wl).item()] + [((g[n] - wg[n]).abs().max() / wg[n].abs().max()).item() for n in g])
            worst = max([worst] + [(r[1][n] - want[1][n]).abs().max().item() for n in want[1]])
        print(name, worst, [sum(k == "DTensor" for k in r[2].values()) for r in b], [s.layers for s in plan.stages], round(time.time() - t, 1), flush=True)
    team.kill()
