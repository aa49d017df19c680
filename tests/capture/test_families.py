"""24 families of transformers: loss and gradients of plain micro-batches, and pipelines used like the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart import LossError
from pipepart.capture import CaptureError
from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import FAMILIES, build, quick, text
from tests.support.recorded import assert_same_step, assert_that_of_the_whole, differing, piped, plainly

HOW: list[dict[str, Any]] = [
    {"stages": 3, "strict": True},
    {"stages": 2, "schedule": "gpipe", "recompute": "always"},
    {"stages": 3, "schedule": "zb-h1"},
    {"stages": 4, "schedule": "interleaved-1f1b", "chunks": 2},
    {"stages": 4, "schedule": "1f1b", "dtype": torch.bfloat16},
]
TWO_WAYS = [(name, (index + more) % len(HOW)) for index, name in enumerate(FAMILIES) for more in (0, 2)]
QUICK = [("gpt2", 0), ("t5", 0), ("mixtral", 2), ("llama", 1), ("bert", 4), ("gpt2 for classes", 0)]
OWN: dict[str, dict[str, Any]] = {
    "clip": {"reduction": "mean"},  # compares the samples of a micro-batch with each other
    "wav2vec2": {"weights": [1.0, 1.0]},  # its loss is a sum
}


@pytest.mark.parametrize(("name", "how"), quick(QUICK, TWO_WAYS))
def test_own_loss(name, how):
    settings = dict(HOW[how])
    model, sample = build(name, settings.pop("dtype", torch.float32))
    assert_same_step(model, sample, **settings, **OWN.get(name, {}))


@pytest.mark.parametrize("parts", quick([3], [3, 4]))
def test_uneven_labels_count_as_in_the_mini_batch(parts):
    (model, sample), (plain, _) = build("llama"), build("llama")
    sample["labels"][0] = -100
    sample["labels"][1, 3:] = -100
    sample: dict[str, Any] = {name: torch.cat([tensor, tensor[:3]]) for name, tensor in sample.items()}
    with piped(model, sample, stages=3, parts=parts) as pipe:
        loss = pipe.step(**sample)
    expected = plainly(plain, sample, parts=1)
    assert_that_of_the_whole(model, plain, loss, expected, atol=1e-7)


def test_the_number_of_items_in_the_batch():
    (model, sample), (plain, _) = build("llama"), build("llama")
    sample["labels"][0] = -100
    counted = {**sample, "num_items_in_batch": (sample["labels"][:, 1:] != -100).sum()}
    with piped(model, counted) as pipe:
        loss = pipe.step(**counted)
    torch.testing.assert_close(loss, plainly(plain, sample, parts=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", quick(["gpt2"], ["gpt2", "t5", "vit"]))
def test_outputs_are_what_the_model_returns(name):
    model, sample = build(name)
    with piped(model, sample, stages=2) as pipe:
        with torch.no_grad():
            found, expected = pipe(**sample), model(**sample)
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        loss, output = pipe.step(**sample, return_outputs=True)
        assert torch.equal(output.loss, loss)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_call_has_the_gradients_of_the_mini_batch():
    (model, sample), (plain, _) = build("llama"), build("llama")
    sample["labels"][0] = -100
    with piped(model, sample) as pipe:
        loss = pipe(**sample).loss
        loss.backward()
        with pytest.raises(TypeError, match="computes its own loss"):
            pipe.step(**sample, target=sample["labels"])
    assert_that_of_the_whole(model, plain, loss.detach(), plain(**sample).loss, atol=1e-7)


def test_a_cache_is_refused_with_the_words_to_write():
    model, sample = build("llama")
    with pytest.raises(CaptureError, match=r"DynamicCache at .*modeling_llama\.py:\d+.*pass use_cache=False"):
        piped(model, {**sample, "use_cache": True})


@pytest.mark.parametrize("name", quick(["llama"], ["llama", "gpt2", "t5"]))
def test_the_default_cache_is_left_out_and_that_is_said_once(name):
    """Then text is continued as by generate: the ids have their final length, so that the model is recorded once."""
    (model, sample), (plain, _) = build(name), build(name)
    model.config.use_cache = True
    ids = sample["input_ids"][:, :3]
    with pytest.warns(UserWarning, match=r"config\.use_cache of .* is taken as False") as said:
        pipe = piped(model, sample)
    with pipe:
        loss = pipe.step(**sample)
        assert len([one for one in said if "use_cache" in str(one.message)]) == 1
        assert model.config.use_cache is True
        torch.testing.assert_close(loss, plainly(plain, sample))
        assert differing(model, plain) == []
        if name == "t5":
            return
        wanted = plain.eval().generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        pipe.eval()
        found = torch.nn.functional.pad(ids, (0, 4))
        with torch.no_grad():
            for n in range(3, 7):
                found[:, n] = pipe(input_ids=found).logits[:, n - 1].argmax(-1)
        assert torch.isfinite(pipe.evaluate(input_ids=found, labels=found))
    assert torch.equal(found, wanted)


def test_two_towers_train_on_the_whole_batch_by_a_loss_beside_the_model():
    model, sample = build("clip")
    del sample["return_loss"]
    (plain,) = deep_copies(model)

    def contrastive(out: Any) -> Tensor:
        logits = out.text_embeds @ out.image_embeds.T * model.logit_scale.exp()
        which = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, which) + F.cross_entropy(logits.T, which)) / 2

    how: dict[str, Any] = {"reduction": "batch", "schedule": "gpipe", "stages": 3, "strict": True}
    with piped(model, sample, loss_fn=contrastive, **how) as pipe:
        loss = pipe.step(**sample)
    assert_that_of_the_whole(model, plain, loss, plain(**sample, return_loss=True).loss)


@pytest.mark.parametrize("name", quick(["clip"], ["clip", "mixtral"]))
def test_a_loss_over_the_batch_is_refused_with_what_to_write(name):
    model, sample = build(name)
    if name == "mixtral":
        model.config.output_router_logits = True
    with piped(model, sample) as pipe, pytest.raises(LossError) as caught:
        pipe.step(**sample)
    for line in (
        'reduction="mean"',
        'loss_fn=loss_fn, reduction="batch"',
        "target=labels",
        "belongs to the last layer",
    ):
        assert line in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


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
