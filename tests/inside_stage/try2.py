from __future__ import annotations
import sys, time, traceback
import torch, torch.distributed as dist
from torch import nn
from tests.support.replicas import cut_replicas
from tests.support.chains import cut_by_hand
from tests.support.ranks import ranks, Failed
from tests.distributed.training import drawn_batches, TIMEOUT
from tests.inside_stage.try1 import model, shard
from pipepart.dtensors import whole


def grads(pipe):
    return {n: None if p.grad is None else whole(p.grad).clone() for n, p in pipe.named_parameters()}


def shard_true(layers, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        if not isinstance(layer, nn.LayerNorm):
            fully_shard(layer.a, mesh=mesh["dp"], reshard_after_forward=True)
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)


def pipe_of(inside, m=4, replicas=2, borders=(4,), f=shard, mod=None, **how):
    return cut_replicas(
        mod or model(),
        list(borders),
        replicas,
        loss_fn=nn.MSELoss(),
        micro_batches=m,
        timeout=TIMEOUT,
        **({"parallelize": f} if inside else {}),
        **how,
    )


def small_batches(inside):
    with pipe_of(inside) as pipe:
        out = []
        for x, y in drawn_batches([1, 3, 8, 2], width=6):
            pipe.zero_grad()
            out.append((pipe.step(x, target=y), grads(pipe), pipe.evaluate(x, target=y)))
        return out


def accumulate(inside):
    with pipe_of(inside) as pipe:
        for x, y in drawn_batches([8, 7, 8], width=6):
            pipe.step(x, target=y, loss_weight=1 / 3)
        return grads(pipe)


def frozen(inside):
    mod = model()
    mod[0].a.requires_grad_(False)
    mod[2].requires_grad_(False)
    mod[5].requires_grad_(False)
    with pipe_of(inside, mod=mod) as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        g1 = grads(pipe)
        mod[0].a.requires_grad_(True)
        return g1


def differentiable(inside):
    with pipe_of(inside) as pipe:
        res = []
        for x, y in drawn_batches([8, 5], width=6):
            x.requires_grad_()
            out = pipe(x)
            loss = (out - y).square().mean()
            pipe.evaluate(x.detach(), target=y)
            loss.backward()
            res.append((loss.detach(), x.grad.clone(), grads(pipe)))
            pipe.zero_grad()
        return res


def resharding(inside):
    with pipe_of(inside, f=shard_true, schedule="1f1b") as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        return grads(pipe)


def resharding_zb(inside):
    with pipe_of(inside, f=shard_true, schedule="zb-h1") as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        return grads(pipe)


def resharding_interleaved(inside):
    with pipe_of(inside, f=shard_true, schedule="interleaved-1f1b", borders=(2, 4, 6), chunks=2) as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        return grads(pipe)


def recompute(inside):
    with pipe_of(inside, recompute="always") as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        return grads(pipe)


def recompute_true(inside):
    with pipe_of(inside, recompute="always", f=shard_true) as pipe:
        for x, y in drawn_batches([8], width=6):
            pipe.step(x, target=y)
        return grads(pipe)


def dp1(inside):
    with pipe_of(inside, replicas=1, borders=(2, 4, 6)) as pipe:
        for x, y in drawn_batches([8, 8], width=6):
            pipe.step(x, target=y)
        return grads(pipe), pipe.full_state_dict()


def dp4(inside):
    with pipe_of(inside, replicas=4, borders=()) as pipe:
        for x, y in drawn_batches([8], width=6):
            loss = pipe.step(x, target=y)
        return loss, grads(pipe), pipe.full_state_dict()


def dp4_accum(inside):
    with pipe_of(inside, replicas=4, borders=()) as pipe:
        for x, y in drawn_batches([8, 8], width=6):
            loss = pipe.step(x, target=y)
        return loss, grads(pipe), pipe.full_state_dict()


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def sometimes_shard(layers, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        for m in layer.children():
            fully_shard(m, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh["dp"])


def sometimes(inside):
    torch.manual_seed(0)
    mod = nn.Sequential(Sometimes(), nn.Tanh(), Sometimes(), Sometimes()).double()
    with pipe_of(inside, mod=mod, borders=(2,), f=sometimes_shard) as pipe:
        x, y = drawn_batches([8], width=6)[0]
        x[::2] += 10
        x[1::2] -= 10
        x = torch.cat([x[::2], x[1::2]])
        loss = pipe.step(x, target=y)
        return loss, grads(pipe)


def scaler(inside):
    with pipe_of(inside) as pipe:
        s = torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for x, y in drawn_batches([8, 8], width=6):
            opt.zero_grad()
            loss = pipe.step(x, target=y, scaler=s)
            g = grads(pipe)
            s.unscale_(opt)
            n = pipe.clip_grad_norm_(0.5)
            pipe.clip_grad_value_(0.01)
            s.step(opt)
            s.update()
        return loss, g, n, pipe.full_state_dict()


def dropout(inside):
    mod = nn.Sequential(*[nn.Sequential(l, nn.Dropout(0.2)) for l in model()])

    def f(layers, mesh):
        from torch.distributed.fsdp import fully_shard

        for l in layers.values():
            if list(l.parameters()):
                fully_shard(l, mesh=mesh["dp"])

    with pipe_of(inside, mod=mod, borders=(8,), f=f) as pipe:
        for x, y in drawn_batches([8, 8], width=6):
            loss = pipe.step(x, target=y)
        return loss, grads(pipe)


def load(inside):
    with pipe_of(inside) as pipe:
        sd = {k: v + 1 for k, v in pipe.full_state_dict().items()}
        pipe.load_state_dict(sd)
        own = pipe.state_dict()
        pipe.load_state_dict({**sd, **own})
        x, y = drawn_batches([8], width=6)[0]
        return pipe.full_state_dict(), pipe.step(x, target=y)


def equal(a, b, path=""):
    if isinstance(a, dict):
        return [d for k in a for d in equal(a[k], b[k], f"{path}.{k}")] + (
            [] if a.keys() == b.keys() else [path + " keys"]
        )
    if isinstance(a, (list, tuple)):
        return [d for i, (p, q) in enumerate(zip(a, b)) for d in equal(p, q, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if torch.equal(a, b):
            return []
        return [f"{path} {(a - b).abs().max().item():.1e}"]
    return [] if a == b else [f"{path} {a} {b}"]


if __name__ == "__main__":
    names = sys.argv[1:] or [
        n
        for n, f in list(globals().items())
        if callable(f)
        and getattr(f, "__module__", "") == "__main__"
        and n not in ("grads", "pipe_of", "equal", "shard_true", "Sometimes", "sometimes_shard")
    ]
    import tests.inside_stage.try2 as here

    for name in names:
        t = time.time()
        team = ranks(4)
        try:
            a = team.run(getattr(here, name), False)
            b = team.outcomes(getattr(here, name), True, seconds=60)
        except Exception as e:
            print(name, "RAISED", str(e)[-1500:])
            continue
        bad = [x for x in b if isinstance(x, Failed)]
        if bad:
            print(name, "FAILED", "\n".join(x.traceback[-1500:] for x in bad[:4]))
            team.kill()
            continue
        diff = [equal(p, q) for p, q in zip(a, b)]
        print(
            name,
            "EQUAL" if not any(diff) else (len(diff[0]), diff[0][:3]),
            round(time.time() - t, 1),
            "s",
            flush=True,
        )
    ranks(4).kill()
