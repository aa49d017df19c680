"""Plans run by torch.distributed.pipelining in two processes: its gradients are those of the plain model."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import pipepart
import schedules
from pipepart import Cluster, Plan
from tests.planning.export.language_model import batch, by_hand, loss_of, model_of, profile_of
from tests.support.processes import run_script

pytestmark = pytest.mark.usefixtures("short_profiles")

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

# Both ranks run every export, each of which torch cuts at its split points, and save the gradients of their stages.
RANKS = """
import os, runpy, sys, warnings
import torch
from pathlib import Path
from torch.distributed.pipelining import pipeline
from tests.planning.export.language_model import batch, loss_of, model_of

folder = Path({folder!r})
torch.set_num_threads(1)
child = os.fork()
rank = int(child == 0)
torch.distributed.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
tokens, words = batch()
for exported in sorted(path for path in folder.iterdir() if path.is_dir()):
    made = runpy.run_path(str(exported / "torch_stages.py"))
    pipe = pipeline(
        model_of(), mb_args=(tokens[: len(tokens) // made["MICRO_BATCHES"]],), split_spec=made["SPLIT_POINTS"]
    )
    own = made["STAGES_OF_RANK"][rank]
    stages = made["build_stages"](pipe, rank, torch.device("cpu"))
    schedule = made["build_schedule"](stages, loss_of)
    losses = []
    first, last = 0 in own, len(made["LAYERS"]) - 1 in own
    schedule.step(*([tokens] if first else []), **(dict(target=words, losses=losses) if last else {{}}))
    modules = [pipe.get_stage_module(number) for number in own]
    found = {{name: p.grad for module in modules for name, p in module.named_parameters()}}
    torch.save((found, sum(losses) / len(losses) if last else None), exported / f"rank{{rank}}.pt")
torch.distributed.destroy_process_group()
if rank:
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def planned(schedule: str, **options: Any) -> Plan:
    profile = profile_of(model_of())
    return pipepart.plan(
        profile,
        Cluster.virtual(2, threads=1),
        schedule=schedule,
        micro_batches=4,
        recompute="never",
        **options,
    )


def uneven() -> Plan:
    """Three stages on two devices and some split backwards, as a search may find them."""
    actions = [
        "0F0,0F1,0F2,0F3,2F0,2B0,2F1,2I1,2F2,2B2,2W1,2F3,0B0,2B3,0B1,0B2,0B3",
        "1F0,1F1,1F2,1F3,1B0,1I1,1W1,1B2,1B3",
    ]
    return by_hand([0, 1, 0], [2, 6], actions, 4)


@pytest.mark.slow
def test_torch_gives_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    plans = {
        "1f1b": planned("1f1b", stages=2),
        "interleaved": planned("interleaved-1f1b", stages=4),
        "v": planned("zb-v", stages=4),
        "overlapped": planned("dualpipe-v", stages=4),
        "uneven": uneven(),
    }
    for name, plan in plans.items():
        plan.export("torch-pipelining").save(tmp_path / name)
    ended = run_script(RANKS.format(folder=str(tmp_path)))
    assert ended.returncode == 0, ended.stderr
    model, (tokens, words) = model_of(), batch()
    loss = loss_of(model(tokens), words)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name in plans:
        ranks = [torch.load(tmp_path / name / f"rank{rank}.pt") for rank in range(2)]
        found = {key: gradient for gradients, _ in ranks for key, gradient in gradients.items()}
        assert found.keys() == wanted.keys(), name
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-11, atol=1e-14, msg=f"{name}: {key}")
        (mean,) = (mean for _, mean in ranks if mean is not None)
        torch.testing.assert_close(mean, loss.detach())


def test_the_files_are_those_of_one_replica() -> None:
    profile = profile_of(model_of(), micro_batches=8)
    plan = pipepart.plan(
        profile, Cluster.virtual(4, threads=1), schedule="1f1b", replicas=2, stages=2, recompute="never"
    )
    exported = plan.export("torch-pipelining")
    rows = list(csv.reader(exported.files["schedule.csv"].splitlines()))
    assert rows == [list(map(str, row)) for row in schedules.build("1f1b", 2, 4).actions]
    assert "MICRO_BATCHES = 4\n" in exported.files["torch_stages.py"]
    assert "data-parallel degree of 2" in exported.files["torch_stages.py"]


def test_a_split_point_is_a_module_that_is_called_once() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.second(self.act(self.first(x))))

    profile = pipepart.profile(Twice(), torch.randn(4, 4), micro_batches=2, layers=["first", "second", "act"])
    plan = pipepart.plan(profile, Cluster.virtual(2, threads=1), schedule="1f1b", cut_before=["act"])
    with pytest.raises(ValueError, match=r"'act', which is called 2 times.*colocate=\[\['first', 'act'\]\]"):
        plan.export("torch-pipelining")
