"""What changes between the steps of a pipeline: settings, arguments, adapters, and a model that is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import build, quick, text
from tests.support.recorded import differing, piped, plainly


def assert_alike(model: Any, sample: Any, changes: list[Callable[[Any], Any]], **how: Any) -> None:
    """Assert that a step after each change, which may give another sample, is that of the plain model."""
    (plain,) = deep_copies(model)
    with piped(model, sample, stages=3, **how) as pipe:
        for change in changes:
            for one in (plain, model):
                one.zero_grad()
                given = change(one)
                sample = given if isinstance(given, dict) else sample
            pipe.step(**sample)
            plainly(plain, sample)
            assert differing(model, plain) == []


@pytest.mark.parametrize(
    ("name", "reentrant"),
    quick([("gpt2", True)], [("gpt2", False), ("gpt2", True), ("llama", True), ("t5", False), ("vit", True)]),
)
def test_checkpointing_is_switched_on_and_off(name, reentrant):
    model, sample = build(name)
    settings = {"use_reentrant": reentrant}
    changes = [
        lambda one: one.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings),
        lambda one: one.gradient_checkpointing_disable(),
    ]
    assert_alike(model, sample, changes, recompute="always" if reentrant else "never")


@pytest.mark.parametrize("name", quick(["llama"], ["llama", "gpt2", "t5"]))
def test_attention_is_switched(name):
    model, sample = build(name)
    kinds = ("eager", "sdpa", "eager")
    assert_alike(model, sample, [lambda one, kind=kind: one.set_attn_implementation(kind) for kind in kinds])


def test_parts_are_frozen_and_thawed():
    model, sample = build("llama")

    def freezing(path: str) -> Callable[[Any], None]:
        def change(one: Any) -> None:
            one.requires_grad_(True)
            one.get_submodule(path).requires_grad_(False)

        return change

    paths = ("model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head", "model")
    thawed = [*map(freezing, paths), lambda one: one.requires_grad_(True)]
    assert_alike(model, sample, thawed, schedule="zb-h1")


def test_arguments_and_lengths_differ_at_every_step():
    def given(length: int, extra: str = "") -> Callable[[Any], dict[str, Any]]:
        def change(one: Any) -> dict[str, Any]:
            sample: dict[str, Any] = {**text(length)}
            if extra == "position_ids":
                sample[extra] = torch.arange(length).expand(4, -1)
            if extra == "inputs_embeds":
                sample[extra] = one.get_input_embeddings()(sample.pop("input_ids")).detach()
            return sample

        return change

    changes = [given(10), given(6, "position_ids"), given(13), given(8, "inputs_embeds"), given(6)]
    assert_alike(*build("llama"), changes, strict=True)


TARGETS: dict[str, list[str]] = {"llama": ["q_proj"], "gpt2": ["c_attn"], "bert": ["query"], "t5": ["q", "v"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_are_trained_and_switched(name):
    peft: Any = pytest.importorskip("peft")
    model, sample = build(name)
    settings = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=TARGETS[name], lora_dropout=0.0, init_lora_weights=False
    )
    model = peft.get_peft_model(model, settings)
    model.add_adapter("other", settings)
    names = ("default", "other", "default")
    assert_alike(model, sample, [lambda one, name=name: one.set_adapter(name) for name in names])


def trained(pipe: Any, sample: Any) -> None:
    """Train two steps."""
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
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
        with piped(again.eval(), sample, stages=1) as other:
            assert torch.equal(pipe.evaluate(**sample), other.evaluate(**sample))
