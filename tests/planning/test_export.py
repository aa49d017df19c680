"""Plans written for other engines: torch.distributed.pipelining and torchtitan."""

from __future__ import annotations

import csv
import re
import runpy
import types
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
import schedules
from pipepart import Cluster, Plan, Profile
from pipepart.planning.costs.stage_memory import Mode
from pipepart.planning.export import ENGINES
from schedules import Schedule
from tests.support.ranks import ranks
from tests.support.searched import searched_plan

pytestmark = pytest.mark.usefixtures("short_profiles")


WIDTH, WORDS = 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class LanguageModel(nn.Module):
    def __init__(self, blocks: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (8, 3), generator=generator)
    return tokens, tokens.roll(1, 1)


def profile_of(model: nn.Module, micro_batches: int = 4, layers: list[str] | None = None) -> Profile:
    tokens, words = batch()
    options: dict[str, Any] = {"micro_batches": micro_batches, "layers": layers}
    return pipepart.profile(model, tokens, loss_fn=loss_of, target=words, **options)


def model_of() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel().double()


NAMES = ["tok_embeddings", *(f"layers.{index}" for index in range(5)), "norm", "output"]
# Three stages on two devices and some split backwards, as a search may find them.
UNEVEN = """0F0,0F1,0F2,0F3,2F0,2B0,2F1,2I1,2F2,2B2,2W1,2F3,0B0,2B3,0B1,0B2,0B3
1F0,1F1,1F2,1F3,1B0,1I1,1W1,1B2,1B3"""


def uneven() -> Plan:
    return searched_plan(NAMES, [2, 6], Schedule.from_csv(UNEVEN))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(LanguageModel())


def planned(profile: Profile, schedule: str = "1f1b", devices: int = 2, **options: Any) -> Plan:
    options = {"recompute": "never", "micro_batches": 4, "schedule": schedule, **options}
    return pipepart.plan(profile, Cluster.virtual(devices, threads=1), **options)


def test_layers_that_share_tensors_in_two_stages_are_refused() -> None:
    plan = planned(profile_of(LanguageModel(tied=True)), cut_before=["layers.3"], allow_split_ties=True)
    for engine in ENGINES:
        with pytest.raises(
            ValueError, match=r"'tok_embeddings' .stage 0. and 'output' .stage 1. share tensors"
        ):
            plan.export(engine)


def test_torchtitan_gets_the_modules_of_each_part(profile: Profile, tmp_path: Path) -> None:
    parts = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
    for schedule, torch_name in parts.items():
        plan = planned(profile, schedule, stages=2 if schedule == "1f1b" else 4)
        plan.export("torchtitan").save(tmp_path)
        config = types.SimpleNamespace(parallelism=types.SimpleNamespace())
        options = runpy.run_path(str(tmp_path / "torchtitan_parallelism.py"))["apply"](config).parallelism
        assert options.pipeline_parallel_degree == 2
        assert options.pipeline_parallel_schedule == torch_name
        assert options.module_fqns_per_model_part == [list(stage.layers) for stage in plan.stages]
        assert Path(options.pipeline_parallel_schedule_csv).read_text() == plan.build_schedule().to_csv()


def test_torchtitan_refuses_what_it_would_silently_drop(profile: Profile) -> None:
    chain = profile_of(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        planned(chain, cut_before=["1"]).export("torchtitan")
    inside = [f"layers.{index}.{part}" for index in range(5) for part in ("norm", "linear")]
    opened = profile_of(LanguageModel(), layers=["tok_embeddings", *inside, "norm", "output"])
    with pytest.raises(ValueError, match=r"which 'layers\.0\.norm' is not \(nor are 9 other"):
        planned(opened).export("torchtitan")


def recomputing(plan: Plan, *modes: Mode) -> Plan:
    stages = tuple(stage.with_mode(mode) for stage, mode in zip(plan.stages, modes, strict=True))
    return plan.model_copy(update={"stages": stages})


def test_what_engines_do_not_run_is_refused(profile: Profile) -> None:
    plan = planned(profile, cut_before=["layers.3"])
    swapped = searched_plan(NAMES, [3], Schedule.from_csv("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n"))
    of_batches = plan.model_copy(update={"constraints": replace(plan.constraints, reduction="batch")})
    cases: list[tuple[Iterable[str], Plan, str]] = [
        (ENGINES, plan.model_copy(update={"schedule": "pipedream"}), "asynchronous"),
        (ENGINES, plan.model_copy(update={"schedule": "chimera"}), "two copies"),
        (ENGINES, of_batches, "reduction='batch'"),
        (ENGINES, recomputing(plan, "offload", "offload"), "stage 0, 1 offloads.*offload='never'"),
        (["torchtitan"], recomputing(plan, "always", "never"), "stage 0 recomputes.*recompute='always' or"),
        (["torchtitan"], uneven(), "not 0, 1, 0"),
        (["torch-pipelining"], recomputing(plan, "always", "always"), "plan with recompute='never'"),
        (["torch-pipelining"], swapped, "forwards in the order 1, 0"),
    ]
    for engines, changed, says in cases:
        for engine in engines:
            with pytest.raises(ValueError, match=f"{engine} cannot run this plan:\n.*{says}"):
                changed.export(engine)
    with pytest.raises(ValueError, match=r"no engine is called 'jax'.*torch-pipelining, torchtitan"):
        plan.export("jax")


def test_values_that_are_used_far_behind_are_named() -> None:
    class Gated(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            first = x = self.tok_embeddings(tokens)
            for layer in self.layers:
                x = layer(x) * first
            return self.output(self.norm(x))

    plan = planned(profile_of(Gated()), devices=3, cut_before=["layers.1", "layers.3"])
    says = "a value of 'tok_embeddings' (stage 0) in 'norm' (stage 2)"
    with pytest.raises(ValueError, match=re.escape(says)):
        plan.export("torch-pipelining")
    text = " ".join("".join(plan.export("torchtitan").files.values()).replace("#", "").split())
    assert says in text


def on_rank(folder: Path) -> dict[str, tuple[dict[str, Tensor | None], Tensor | None]]:
    """Run every export, which torch cuts at its split points; return the gradients of the own stages and the loss."""
    from torch.distributed.pipelining import pipeline

    alone = not torch.distributed.is_initialized()
    if alone:
        torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), {}
    tokens, words = batch()
    for exported in sorted(folder.iterdir()):
        made = runpy.run_path(str(exported / "torch_stages.py"))
        part = tokens[: len(tokens) // made["MICRO_BATCHES"]]
        pipe = pipeline(model_of(), mb_args=(part,), split_spec=made["SPLIT_POINTS"])
        own = made["STAGES_OF_RANK"][rank]
        schedule = made["build_schedule"](made["build_stages"](pipe, rank, torch.device("cpu")), loss_of)
        losses: list[Tensor] = []
        last = len(made["LAYERS"]) - 1 in own
        schedule.step(*[tokens] * (0 in own), **({"target": words, "losses": losses} if last else {}))
        modules = [pipe.get_stage_module(number) for number in own]
        gradients = {name: p.grad for module in modules for name, p in module.named_parameters()}
        found[exported.name] = gradients, sum(losses) / len(losses) if last else None
    if alone:
        torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_torch_gives_the_gradients_of_the_plain_model(profile: Profile, tmp_path: Path) -> None:
    names = ("interleaved-1f1b", "zb-v", "dualpipe-v")
    plans = {name: planned(profile, name, stages=4) for name in names}
    plans |= {"1f1b": planned(profile, stages=2), "uneven": uneven()}
    for name, plan in plans.items():
        plan.export("torch-pipelining").save(tmp_path / name)
    first, second = ranks(2).run(on_rank, tmp_path)
    model, (tokens, words) = model_of(), batch()
    loss = loss_of(model(tokens), words)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name in plans:
        found = first[name][0] | second[name][0]
        assert found.keys() == wanted.keys(), name
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-11, atol=1e-14, msg=f"{name}: {key}")
        (mean,) = (mean for _, mean in (first[name], second[name]) if mean is not None)
        torch.testing.assert_close(mean, loss.detach())


def test_the_files_are_those_of_one_replica() -> None:
    made = profile_of(LanguageModel(), micro_batches=8)
    plan = planned(made, devices=4, micro_batches=8, replicas=2, stages=2)
    exported = plan.export("torch-pipelining")
    rows = list(csv.reader(exported.files["schedule.csv"].splitlines()))
    assert rows == [list(map(str, row)) for row in schedules.build("1f1b", 2, 4).actions]
    assert "MICRO_BATCHES = 4\n" in exported.files["torch_stages.py"]
    assert "data-parallel degree of 2" in exported.files["torch_stages.py"]


def test_a_split_point_is_a_module_that_is_called_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.second(self.act(self.first(x))))

    profile = pipepart.profile(Twice(), torch.randn(4, 4), micro_batches=2, layers=["first", "second", "act"])
    plan = planned(profile, micro_batches=2, cut_before=["act"])
    with pytest.raises(ValueError, match=r"'act', which is called 2 times.*colocate=\[\['first', 'act'\]\]"):
        plan.export("torch-pipelining")
