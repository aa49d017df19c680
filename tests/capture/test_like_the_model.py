"""A pipeline of a recorded model can be used like the model: outputs, evaluation, saving, adapters, checks."""

import copy
from typing import Any

import pytest
import torch

from pipepart.capture import CaptureError
from tests.capture.families import build, quick
from tests.support.recorded import assert_same_step, assert_that_of_the_whole, differing, piped, plainly

pytestmark = pytest.mark.usefixtures("short_profiles")

transformers: Any = pytest.importorskip("transformers")


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
    assert_that_of_the_whole(model, plain, loss.detach(), plain(**sample).loss, atol=1e-7)


def test_evaluation_changes_nothing():
    model, sample = build("resnet")
    before = copy.deepcopy(model.state_dict())
    with piped(model, sample) as pipe:
        loss = pipe.evaluate(**sample)
        assert model.training
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss, model(**sample).loss, rtol=1e-6, atol=0)


TARGETS: dict[str, list[str]] = {"llama": ["q_proj"], "gpt2": ["c_attn"], "bert": ["query"], "t5": ["q", "v"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_adapters(name):
    peft: Any = pytest.importorskip("peft")
    model, sample = build(name)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[name], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, settings)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter)
    assert_same_step(adapted, sample, stages=3)


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
    (model, sample), (plain, _) = build(name), build(name)
    model.config.use_cache = True
    with pytest.warns(UserWarning, match=r"config\.use_cache of .* is taken as False") as said:
        pipe = piped(model, sample)
    with pipe:
        loss = pipe.step(**sample)
    assert len([one for one in said if "use_cache" in str(one.message)]) == 1
    assert model.config.use_cache is True
    torch.testing.assert_close(loss, plainly(plain, sample))
    assert differing(model, plain) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_text_is_continued_through_the_stages_as_by_generate(name):
    """The ids have their final length from the start, so that the model is recorded once."""
    model, sample = build(name)
    model.config.use_cache = True  # the default of transformers
    ids = sample["input_ids"][:, :3]
    wanted = copy.deepcopy(model).eval().generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with pytest.warns(UserWarning, match="is taken as False"):
        pipe = piped(model, sample)
    with pipe, torch.no_grad():
        pipe.eval()
        found = torch.nn.functional.pad(ids, (0, 4))
        for n in range(3, 7):
            found[:, n] = pipe(input_ids=found).logits[:, n - 1].argmax(-1)
        assert torch.isfinite(pipe.evaluate(input_ids=found, labels=found))
    assert torch.equal(found, wanted)


def test_a_target_beside_the_models_own_loss_is_refused():
    model, sample = build("llama")
    with piped(model, sample) as pipe, pytest.raises(TypeError, match="computes its own loss"):
        pipe.step(**sample, target=sample["labels"])


@pytest.mark.parametrize("name", quick(["llama"], ["llama", "bert"]))
def test_hidden_states_and_attentions_that_blocks_leave_aside(name):
    model, sample = build(name)
    model.set_attn_implementation("eager")
    sample |= {"output_hidden_states": True, "output_attentions": True}
    with piped(model, sample) as pipe, torch.no_grad():
        found, expected = pipe(**sample), model(**sample)
    assert len(found.hidden_states) == len(expected.hidden_states)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_router_logits_that_experts_leave_aside():
    model, sample = build("mixtral")
    model.config.output_router_logits = True
    assert_same_step(model, sample, stages=3, reduction="mean")
