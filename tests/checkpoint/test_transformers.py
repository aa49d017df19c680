"""transformers reads the model of a checkpoint, and its weights have the names that it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipepart

pytestmark = pytest.mark.usefixtures("short_profiles")

transformers: Any = pytest.importorskip("transformers")


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=8,
        vocab_size=16,
        max_position_embeddings=8,
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize(("make", "dtype"), [(gpt2, torch.float32), (bert, torch.bfloat16)])
def test_from_pretrained_reads_a_checkpoint(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    path = pipepart.save(tmp_path, model, step=3).path
    found, told = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(found, model)
    assert found.dtype == dtype


def assert_same(found: Any, model: Any) -> None:
    state = model.state_dict()
    assert found.state_dict().keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in found.state_dict().items())


def test_a_trained_pipeline_becomes_a_model_of_transformers(tmp_path: Path) -> None:
    model = gpt2()
    ids = torch.randint(16, (4, 8))
    sample = pipepart.Arguments(input_ids=ids, labels=ids)
    with pipepart.Pipeline.auto(model, sample, devices=2, micro_batches=2) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        pipe.step(input_ids=ids, labels=ids)
        optimizer.step()
        pipepart.save(tmp_path, pipe, optimizer, step=1)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    assert type(found) is type(model)
    assert_same(found, model)


def test_a_pipeline_is_made_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    trained = gpt2()
    pipepart.save(tmp_path, trained, step=0)
    with pipepart.deferred_init():
        other = gpt2()
    ids = torch.randint(16, (4, 8))
    sample = pipepart.Arguments(input_ids=ids, labels=ids)
    with pipepart.Pipeline.auto(
        other, sample, devices=2, micro_batches=2, weights=tmp_path / "latest"
    ) as pipe:
        assert_same(pipe.module, trained)
