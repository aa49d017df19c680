"""Tiny models of 18 families of transformers, each with a mini-batch of four samples and labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".*loss_type.*")

_IDS = 40  # words
_TEXT: dict[str, Any] = {"vocab_size": _IDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_KEYS: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "use_cache": False,
}

Sample = dict[str, Tensor]
Family = tuple[Callable[[], nn.Module], Callable[[], Sample]]


def words(*shape: int, seed: int = 1) -> Tensor:
    """Random words that are neither padding nor an end."""
    return torch.randint(3, _IDS, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(length: int = 10, masked: bool = True) -> Sample:
    """Text of its own next words, some of it padding."""
    ids = words(4, length)
    mask = torch.ones_like(ids)
    if masked:
        mask[0, -3:] = mask[2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pictures(classes: int = 5) -> Sample:
    """Pictures with a class each."""
    return {"pixel_values": noise(4, 3, 16, 16), "labels": torch.tensor([0, 3, 1, classes - 1])}


def _language(config: str, model: str, **changes: Any) -> Family:
    def build() -> nn.Module:
        settings = {**_TEXT, **_SIZES, **_KEYS, **changes}
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build, text


def _other(config: str, model: str, sample: Callable[[], Sample], **settings: Any) -> Family:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)), sample


def _seq2seq() -> Sample:
    return {"input_ids": words(4, 9), "labels": words(4, 6, seed=5)}


def _speech() -> Sample:
    return {"input_features": noise(4, 8, 20), "labels": words(4, 6)}


def _waves() -> Sample:
    return {"input_values": noise(4, 400), "labels": words(4, 3)}


def _pairs() -> Sample:
    return {
        "input_ids": words(4, 8),
        "attention_mask": torch.ones(4, 8, dtype=torch.long),
        "pixel_values": noise(4, 3, 16, 16),
    }


_VISION: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 4}

FAMILIES: dict[str, Family] = {
    "gpt2": _other(
        "GPT2Config",
        "GPT2LMHeadModel",
        text,
        n_layer=3,
        n_head=2,
        n_embd=16,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_TEXT,
    ),
    "llama": _language("LlamaConfig", "LlamaForCausalLM"),
    "bert": _other(
        "BertConfig",
        "BertForMaskedLM",
        text,
        **_TEXT,
        **_SIZES,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "t5": _other(
        "T5Config",
        "T5ForConditionalGeneration",
        _seq2seq,
        vocab_size=_IDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "vit": _other(
        "ViTConfig",
        "ViTForImageClassification",
        pictures,
        **_VISION,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "mixtral": _language(
        "MixtralConfig",
        "MixtralForCausalLM",
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=False,
    ),
    "qwen3": _language("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma": _language("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": _language("Gemma2Config", "Gemma2ForCausalLM", sliding_window=4),
    "falcon": _other(
        "FalconConfig",
        "FalconForCausalLM",
        text,
        vocab_size=_IDS,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "whisper": _other(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _speech,
        **_TEXT,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=10,
        max_target_positions=12,
        use_cache=False,
        dropout=0.0,
        decoder_start_token_id=1,
    ),
    "clip": (
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={**_TEXT, **_SIZES, "max_position_embeddings": 16},
                vision_config=_VISION,
                projection_dim=16,
            )
        ),
        _pairs,
    ),
    "mamba": _other(
        "MambaConfig",
        "MambaForCausalLM",
        text,
        **_TEXT,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=3,
        use_cache=False,
    ),
    "gpt-neox": _language(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_key_value_heads=2,
    ),
    "opt": _other(
        "OPTConfig",
        "OPTForCausalLM",
        text,
        **_TEXT,
        hidden_size=16,
        num_hidden_layers=3,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
        use_cache=False,
        dropout=0.0,
    ),
    "resnet": _other(
        "ResNetConfig",
        "ResNetForImageClassification",
        pictures,
        num_labels=5,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
    ),
    "swin": _other(
        "SwinConfig",
        "SwinForImageClassification",
        pictures,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    "wav2vec2": _other(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        _waves,
        **_TEXT,
        **_SIZES,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        final_dropout=0.0,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
        ctc_zero_infinity=True,
    ),
}
