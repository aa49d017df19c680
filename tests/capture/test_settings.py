"""Settings of a model that change between steps: checkpointing, attention, what is trained, adapters, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import build, quick, text
from tests.support.recorded import differing, piped, plainly


def assert_alike(model: Any, sample: Any, changes: list[Callable[[Any], Any]], **how: Any) -> None:
    """Assert that a step after each change is that of the plain model with that change."""
    (plain,) = deep_copies(model)
    with piped(model, sample, stages=3, **how) as pipe:
        for change in changes:
            for one in (model, plain):
                one.zero_grad()
                change(one)
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
    assert_alike(
        model, sample, [*map(freezing, paths), lambda one: one.requires_grad_(True)], schedule="zb-h1"
    )


@pytest.mark.slow
def test_adapters_are_switched():
    peft: Any = pytest.importorskip("peft")
    model, sample = build("gpt2")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(model, settings)
    model.add_adapter("other", settings)
    assert_alike(
        model, sample, [lambda one, name=name: one.set_adapter(name) for name in ("other", "default")]
    )


def test_arguments_and_lengths_differ_at_every_step():
    model, sample = build("llama")
    (plain,) = deep_copies(model)
    with piped(model, sample, stages=3, strict=True) as pipe:
        for length, extra in ((10, ""), (6, "position_ids"), (13, ""), (8, "inputs_embeds"), (6, "")):
            given: dict[str, Any] = {**text(length)}
            if extra == "position_ids":
                given[extra] = torch.arange(length).expand(4, -1)
            if extra == "inputs_embeds":
                given[extra] = model.get_input_embeddings()(given.pop("input_ids")).detach()
            for one in (model, plain):
                one.zero_grad()
            pipe.step(**given)
            plainly(plain, given)
            assert differing(model, plain) == []
