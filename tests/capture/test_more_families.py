"""Families of transformers unlike the 18 others: state spaces, windows, pyramids, detectors, series, speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.families import noise, quick, transformers, words
from tests.support.recorded import assert_same_step

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 40, "use_cache": False}
SMALL: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "use_cache": False}
Made = tuple[nn.Module, dict[str, Any]]


def text_model(name: str, **settings: Any) -> Made:
    """A model of words, such as ``RwkvForCausalLM``, and words."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**settings)
    ids = words(4, 12)
    return getattr(transformers, name)(config), {"input_ids": ids, "labels": ids}


def detector() -> Made:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    widths = {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=5,
        **SMALL,
        **widths,
        **heads,
    )
    return transformers.DetrForObjectDetection(config), {"pixel_values": noise(4, 3, 32, 32)}


def segmenter() -> Made:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    labels = words(4, 32, 32) % 3
    labels[:, :9] = 255
    model = transformers.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": noise(4, 3, 32, 32), "labels": labels}


def captioner() -> Made:
    vision = transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=16, patch_size=8))
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, add_cross_attention=True, use_cache=False
    )
    model = transformers.VisionEncoderDecoderModel(
        encoder=vision, decoder=transformers.GPT2LMHeadModel(config)
    )
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model, {"pixel_values": noise(4, 3, 16, 16), "labels": words(4, 8)}


def series() -> Made:
    config = transformers.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=16,
    )
    return transformers.PatchTSTForPrediction(config), {
        "past_values": noise(4, 16, 2),
        "future_values": noise(4, 4, 2, seed=3),
    }


def first_of(output: Any, target: Any = None) -> Tensor:
    """A loss on the first tensor that a model returns."""
    return output[0].square().mean()


MADE: dict[str, Callable[[], Made]] = {
    "mamba2": lambda: text_model(
        "Mamba2ForCausalLM",
        **{**TEXT, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "rwkv": lambda: text_model("RwkvForCausalLM", **TEXT, attention_hidden_size=16),
    "deberta": lambda: text_model(
        "DebertaForMaskedLM", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "longformer": lambda: text_model("LongformerForMaskedLM", **TEXT, attention_window=4),
    "modernbert": lambda: text_model(
        "ModernBertForMaskedLM", **TEXT, pad_token_id=0, cls_token_id=1, sep_token_id=2
    ),
    "funnel": lambda: text_model(
        "FunnelForMaskedLM", vocab_size=40, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=32
    ),
    "olmoe": lambda: text_model("OlmoeForCausalLM", **TEXT, num_experts=3, num_experts_per_tok=2),
    "detr": detector,
    "segformer": segmenter,
    "captions": captioner,
    "patchtst": series,
}


@pytest.mark.parametrize("name", quick(["olmoe", "segformer"], MADE))
def test_a_step_is_that_of_plain_micro_batches(name):
    torch.manual_seed(0)
    model, sample = MADE[name]()
    for part in model.modules():
        for key, value in vars(part).items():
            if isinstance(value, float) and (key == "p" or "drop" in key):
                setattr(part, key, 0.0)
    how: dict[str, Any] = {"loss_fn": first_of} if name == "detr" else {}
    assert_same_step(model.train(), sample, stages=3, schedule="zb-h1", strict=True, **how)
