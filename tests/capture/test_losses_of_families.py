"""Losses of families of transformers that are no plain mean: pooled tokens, masked patches, two towers, routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart import LossError
from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import build, noise, quick, transformers, words
from tests.support.recorded import assert_same_step, assert_that_of_the_whole, piped

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


@pytest.mark.slow
def test_a_mean_over_masked_patches():
    torch.manual_seed(0)
    settings = {name: SMALL[name] for name in list(SMALL)[:4]}
    decoder = {f"decoder_{name}": value for name, value in settings.items()}
    config = transformers.ViTMAEConfig(**settings, **decoder, image_size=16, patch_size=4)
    model = transformers.ViTMAEForPreTraining(config)
    sample = {"pixel_values": noise(4, 3, 16, 16), "noise": noise(4, 16, seed=3)}
    assert_same_step(model, sample, stages=3, schedule="zb-h1")


def test_two_towers_train_on_the_whole_batch_by_a_loss_beside_the_model():
    model, sample = build("clip")
    del sample["return_loss"]
    (plain,) = deep_copies(model)

    def contrastive(out: Any) -> Tensor:
        logits = out.text_embeds @ out.image_embeds.T * model.logit_scale.exp()
        which = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, which) + F.cross_entropy(logits.T, which)) / 2

    with piped(
        model, sample, loss_fn=contrastive, reduction="batch", schedule="gpipe", stages=3, strict=True
    ) as pipe:
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
