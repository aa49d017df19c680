"""Plans written for torchtitan, and plans that other engines cannot run."""

from __future__ import annotations

import re
import runpy
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Plan, Profile
from pipepart.planning.costs.stage_memory import Mode
from pipepart.planning.export import ENGINES
from tests.planning.export.language_model import LanguageModel, by_hand, profile_of

pytestmark = pytest.mark.usefixtures("short_profiles")

UNEVEN = by_hand([0, 1, 0], [2, 6], ["0F0,2F0,2B0,0B0", "1F0,1B0"], 1)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(LanguageModel())


def planned(profile: Profile, schedule: str = "1f1b", **options: Any) -> Plan:
    """A plan for two devices with stages that begin with the layers in ``cut_before``."""
    options = {"recompute": "never", **options}
    return pipepart.plan(
        profile, Cluster.virtual(2, threads=1), schedule=schedule, micro_batches=4, **options
    )


def interleaved(profile: Profile) -> Plan:
    return planned(profile, "interleaved-1f1b", chunks=2, cut_before=["layers.1", "layers.3", "layers.4"])


def run_file(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **modules: Any) -> dict[str, Any]:
    """Run an exported Python file with stand-ins for modules that are not installed."""
    for path, content in modules.items():
        monkeypatch.setitem(sys.modules, path.replace("_", "."), types.SimpleNamespace(**content))
    return runpy.run_path(str(folder / name))


def test_layers_that_share_tensors_in_two_stages_are_refused() -> None:
    plan = planned(profile_of(LanguageModel(tied=True)), cut_before=["layers.3"], allow_split_ties=True)
    for engine in ENGINES:
        with pytest.raises(
            ValueError, match=r"'tok_embeddings' .stage 0. and 'output' .stage 1. share tensors"
        ):
            plan.export(engine)


def test_torchtitan_gets_the_modules_of_each_part(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
    for schedule, torch_name in parts.items():
        options = {"cut_before": ["layers.3"]} if schedule == "1f1b" else {"stages": 4}
        plan = (
            interleaved(profile) if schedule == "interleaved-1f1b" else planned(profile, schedule, **options)
        )
        plan.export("torchtitan").save(tmp_path)
        config = types.SimpleNamespace(parallelism=types.SimpleNamespace())
        options = run_file(tmp_path, "torchtitan_parallelism.py", monkeypatch)["apply"](config).parallelism
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


def with_batch_loss(plan: Plan) -> Plan:
    return plan.model_copy(update={"constraints": replace(plan.constraints, reduction="batch")})


def recomputing(plan: Plan, *modes: Mode) -> Plan:
    stages = tuple(stage.with_mode(mode) for stage, mode in zip(plan.stages, modes, strict=True))
    return plan.model_copy(update={"stages": stages})


def test_what_engines_do_not_run_is_refused(profile: Profile) -> None:
    plan = planned(profile, cut_before=["layers.3"])
    swapped = by_hand([0, 1], [3], ["0F1,0F0,0B0,0B1", "1F1,1F0,1B0,1B1"], 2)
    cases: list[tuple[Iterable[str], Plan, str]] = [
        (ENGINES, plan.model_copy(update={"schedule": "pipedream"}), "asynchronous"),
        (ENGINES, plan.model_copy(update={"schedule": "chimera"}), "two copies"),
        (ENGINES, with_batch_loss(plan), "reduction='batch'"),
        (ENGINES, recomputing(plan, "offload", "offload"), "stage 0, 1 offloads.*offload='never'"),
        (["torchtitan"], recomputing(plan, "always", "never"), "stage 0 recomputes.*recompute='always' or"),
        (["torchtitan"], UNEVEN, "not 0, 1, 0"),
        (["torch-pipelining"], recomputing(plan, "always", "always"), "plan with recompute='never'"),
        (["torch-pipelining"], swapped, "forwards in the order 1, 0"),
    ]
    for engines, changed, says in cases:
        for engine in engines:
            with pytest.raises(ValueError, match=f"{engine} cannot run this plan:\n.*{says}"):
                changed.export(engine)
    with pytest.raises(ValueError, match=r"no engine is called 'jax'.*torch-pipelining, torchtitan"):
        UNEVEN.export("jax")


def test_values_that_are_used_far_behind_are_named() -> None:
    class Gated(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            first = x = self.tok_embeddings(tokens)
            for layer in self.layers:
                x = layer(x) * first
            return self.output(self.norm(x))

    plan = pipepart.plan(
        profile_of(Gated()),
        Cluster.virtual(3, threads=1),
        schedule="1f1b",
        micro_batches=4,
        recompute="never",
        cut_before=["layers.1", "layers.3"],
    )
    says = "a value of 'tok_embeddings' (stage 0) in 'norm' (stage 2)"
    with pytest.raises(ValueError, match=re.escape(says)):
        plan.export("torch-pipelining")
    text = " ".join("".join(plan.export("torchtitan").files.values()).replace("#", "").split())
    assert says in text
