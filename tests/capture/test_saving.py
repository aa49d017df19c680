"""Saving and loading while a pipeline lives: whole models, states, adapters, and words from a trained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.families import build, quick
from tests.support.recorded import differing, piped, plainly


def trained(pipe: Any, sample: Any, steps: int = 2) -> None:
    """Train a few steps."""
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(**sample)
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", quick(["gpt2"], ["gpt2", "t5", "vit"]))
def test_a_trained_model_is_saved_and_loaded_bit_for_bit(name, tmp_path):
    model, sample = build(name)
    with piped(model, sample, stages=3, strict=True) as pipe:
        trained(pipe, sample)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert list(again.state_dict()) == list(pipe.state_dict())
        assert all(map(torch.equal, again.state_dict().values(), pipe.state_dict().values()))
        assert torch.equal(pipe.evaluate(**sample), loss_of_parts(again.eval(), sample))


def loss_of_parts(model: Any, sample: Any) -> torch.Tensor:
    """The loss of a model without a pipeline, on two micro-batches."""
    with piped(model, sample, stages=1) as pipe:
        return pipe.evaluate(**sample)


@pytest.mark.slow
def test_an_adapter_is_saved_loaded_switched_off_and_merged(tmp_path):
    peft: Any = pytest.importorskip("peft")
    (model, sample), (base, _), (bare, _) = build("llama"), build("llama"), build("llama")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, settings)
    with piped(adapted, sample, stages=3) as pipe, torch.no_grad():
        with torch.enable_grad():
            trained(pipe, sample)
        pipe.module.save_pretrained(tmp_path)  # type: ignore[operator]
        again = peft.PeftModel.from_pretrained(base, tmp_path)
        own = pipe(**sample).logits
        torch.testing.assert_close(again(**sample).logits, own, rtol=1e-5, atol=1e-6)
        with adapted.disable_adapter():
            off = pipe(**sample).logits
        torch.testing.assert_close(bare(**sample).logits, off, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(own, off)
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**sample).logits, own, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_words_are_generated_between_steps(name):
    model, sample = build(name)
    (plain, _), prompt = build(name), sample["input_ids"][1:2]
    with piped(model, sample, stages=3, strict=True) as pipe:
        trained(pipe, sample)
        model.eval()
        plain.load_state_dict(pipe.state_dict())
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
        assert torch.equal(model.generate(prompt, **options), plain.eval().generate(prompt, **options))
        model.train()
        pipe.step(**sample)
    plain.train()
    plainly(plain, sample)
    assert differing(model, plain) == []
