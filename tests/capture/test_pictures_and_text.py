"""Models of pictures and text: packed patches that the user splits, and pictures in place of words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipepart
from pipepart.capture.deep_copies import deep_copies
from tests.capture.families import noise, transformers, words
from tests.support.recorded import assert_same_step, assert_that_of_the_whole

pytestmark = pytest.mark.usefixtures("short_profiles")

PICTURE = 39  # the word that stands for a part of a picture
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def sentences() -> dict[str, Any]:
    """Four sentences, each with a picture of four parts, and their own next words as labels."""
    ids = words(4, 9).clamp(max=PICTURE - 1)
    ids[:, 1:5] = PICTURE
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == PICTURE, -100),
        "attention_mask": torch.ones_like(ids),
    }


@pytest.mark.slow
def test_pictures_take_the_place_of_words():
    torch.manual_seed(0)
    vision = {**{name: TEXT[name] for name in list(TEXT)[:4]}, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=PICTURE,
    )
    sample = {**sentences(), "pixel_values": noise(4, 3, 16, 16)}
    assert_same_step(
        transformers.LlavaForConditionalGeneration(config).train(), sample, stages=4, strict=True
    )


def by_pictures(pair: Any, parts: int) -> list[Any]:
    """Split sentences and the patches of their pictures."""
    inputs, target = pair
    patches = inputs.kwargs["image_grid_thw"].prod(1).tolist()
    pixels = inputs.kwargs["pixel_values"].split(patches)
    found = []
    for samples in torch.arange(len(patches)).chunk(parts):
        part = {name: value[samples] for name, value in inputs.kwargs.items() if name != "pixel_values"}
        part["pixel_values"] = pipepart.Whole(torch.cat([pixels[index] for index in samples]))
        found.append((pipepart.Arguments(**part), target))
    return found


@pytest.mark.slow
def test_patches_of_pictures_of_any_size_are_split_by_the_user():
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=PICTURE,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).train()
    (plain,) = deep_copies(model)
    sample = {
        **sentences(),
        "pixel_values": noise(4 * 16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4),
    }
    sample["mm_token_type_ids"] = (sample["input_ids"] == PICTURE).long()
    with pipepart.Pipeline.auto(model, sample, devices=2, micro_batches=2, split=by_pictures) as pipe:
        loss = pipe.step(**sample)
    assert_that_of_the_whole(model, plain, loss, plain(**sample).loss)
