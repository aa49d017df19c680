"""A pipeline of a recorded model can be used like the model: outputs, draws, caches, words, losses of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart import LossError
from pipepart.capture import CaptureError
from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import build, quick, transformers, words
from tests.support.recorded import assert_same_step, assert_that_of_the_whole, differing, piped, plainly


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


def test_dropout_draws_alike_for_every_cut():
    found = []
    for stages, recompute in ((1, "never"), (2, "always"), (4, "never")):
        model, sample = build("gpt2")
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.1
        with piped(model, sample, stages=stages, recompute=recompute) as pipe:
            torch.manual_seed(5)
            found.append((pipe.step(**sample), [p.grad for p in model.parameters()]))
    for loss, gradients in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert all(map(torch.equal, gradients, found[0][1]))


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


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "num_labels": 3,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("family", "kind"), quick([("GPT2", "")], [("Llama", ""), ("GPT2", ""), ("GPT2", "regression")])
)
def test_classes_of_sequences_are_picked_at_the_last_word(family, kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, head_dim=8, use_cache=False)
    if kind:
        config.problem_type, config.num_labels = kind, 1
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    ids = words(4, 9)
    ids[0, -3:] = ids[2, -1:] = 0
    labels = torch.tensor([0, 2, 1, 1])
    sample: dict[str, Any] = {"input_ids": ids, "labels": labels.float() if kind else labels}
    assert_same_step(model, sample, stages=3, strict=True)


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
