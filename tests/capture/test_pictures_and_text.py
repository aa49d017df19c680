"""A model of pictures and text, where parts of pictures take the place of words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.families import noise, transformers, words
from tests.support.recorded import assert_same_step

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
