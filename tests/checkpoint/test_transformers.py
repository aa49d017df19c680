"""transformers reads the model of a checkpoint, and its weights have the names that it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipepart
from tests.capture.families import FAMILIES, transformers
from tests.support import plain

pytestmark = pytest.mark.usefixtures("short_profiles")

IDS = torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"devices": 2, "micro_batches": 2}


def test_from_pretrained_reads_a_checkpoint(tmp_path: Path) -> None:
    model: Any = FAMILIES["bert"][0]().to(torch.bfloat16)
    path = pipepart.save(tmp_path, model, step=3)
    found, told = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain.assert_same(found.state_dict(), model.state_dict())
    assert found.dtype == torch.bfloat16


def test_a_trained_pipeline_becomes_a_model_of_transformers_and_a_pipeline_again(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"][0]()
    sample = pipepart.Arguments(input_ids=IDS, labels=IDS)
    with pipepart.Pipeline.auto(model, sample, **HOW) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        pipe.step(input_ids=IDS, labels=IDS)
        optimizer.step()
        pipepart.save(tmp_path, pipe, optimizer, step=1)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    assert type(found) is type(model)
    plain.assert_same(found.state_dict(), model.state_dict())
    with pipepart.deferred_init():
        other = FAMILIES["gpt2"][0]()
    with pipepart.Pipeline.auto(other, sample, **HOW, weights=tmp_path / "latest") as pipe:
        plain.assert_same(pipe.module.state_dict(), model.state_dict())
