"""Tiny models of 24 families of transformers, each with a mini-batch of four samples and labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
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


def quick(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrised test; all but a few are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in few else pytest.mark.slow
        )
        for case in cases
    ]


Family = tuple[Callable[[], nn.Module], Callable[[], Sample]]


def words(*shape: int, seed: int = 1) -> Tensor:
    """Random words that are neither padding nor an end."""
    return torch.randint(3, _IDS, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
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


def _family(model: str, sample: Callable[[], Sample], **settings: Any) -> Family:
    """A model without dropout, as a pipeline draws other numbers than a plain model, and its mini-batch."""

    def build() -> nn.Module:
        made = getattr(transformers, model)
        config = made.config_class(**settings)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return made(config)

    return build, sample


def _language(model: str, sample: Callable[[], Sample] = text, **changes: Any) -> Family:
    return _family(model, sample, **{**_TEXT, **_SIZES, **_KEYS, **changes})


def _sentences(numbers: bool = False) -> Sample:
    """Sentences of several lengths, each with a class or a number; models pick their last words."""
    ids, labels = words(4, 9), torch.tensor([0, 2, 1, 1])
    ids[0, -3:] = ids[2, -1:] = 0
    return {"input_ids": ids, "labels": labels.float() if numbers else labels}


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


def _illustrated() -> Sample:
    """Sentences, each with a picture of four parts in the place of words."""
    ids = words(4, 9).clamp(max=_IDS - 2)
    ids[:, 1:5] = _IDS - 1
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == _IDS - 1, -100),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": noise(4, 3, 16, 16),
    }


_WORDS: dict[str, Any] = {**_TEXT, **_SIZES, "use_cache": False}
_VISION: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 4}

FAMILIES: dict[str, Family] = {
    "gpt2": _language("GPT2LMHeadModel"),
    "llama": _language("LlamaForCausalLM"),
    "bert": _language("BertForMaskedLM"),
    "t5": _language("T5ForConditionalGeneration", _seq2seq, d_kv=8, d_ff=32, decoder_start_token_id=0),
    "vit": _family("ViTForImageClassification", pictures, **_VISION, num_labels=5),
    "mixtral": _language("MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2),
    "qwen3": _language("Qwen3ForCausalLM"),
    "gemma": _language("GemmaForCausalLM"),
    "gemma2": _language("Gemma2ForCausalLM", sliding_window=4),
    "falcon": _family("FalconForCausalLM", text, **_WORDS),
    "whisper": _family(
        "WhisperForConditionalGeneration",
        _speech,
        **_WORDS,
        **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        decoder_start_token_id=1,
    ),
    "clip": _family(
        "CLIPModel",
        _pairs,
        text_config={**_TEXT, **_SIZES, "max_position_embeddings": 16},
        vision_config=_VISION,
        projection_dim=16,
    ),
    "mamba": _family("MambaForCausalLM", text, **_WORDS, state_size=4),
    "gpt-neox": _language("GPTNeoXForCausalLM", num_key_value_heads=2),
    "opt": _language("OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=16),
    "resnet": _family(
        "ResNetForImageClassification",
        pictures,
        num_labels=5,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
    ),
    "swin": _family(
        "SwinForImageClassification",
        pictures,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        window_size=4,
        num_labels=5,
        depths=[2, 2],
        num_heads=[2, 2],
    ),
    "rwkv": _family("RwkvForCausalLM", text, **_WORDS, attention_hidden_size=16),
    "mamba2": _family(
        "Mamba2ForCausalLM", text, **_WORDS, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=8
    ),
    "deberta": _family(
        "DebertaForMaskedLM", text, **_WORDS, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "longformer": _family("LongformerForMaskedLM", lambda: text(12), **_WORDS, attention_window=4),
    "modernbert": _family("ModernBertForMaskedLM", text, **_WORDS, cls_token_id=1, sep_token_id=2),
    "llava": _family(
        "LlavaForConditionalGeneration",
        _illustrated,
        text_config={"model_type": "llama", **_TEXT, **_SIZES, **_KEYS},
        vision_config={"model_type": "clip_vision_model", **_SIZES, "image_size": 16, "patch_size": 8},
        image_token_index=_IDS - 1,
    ),
    "wav2vec2": _family(
        "Wav2Vec2ForCTC",
        _waves,
        **_TEXT,
        **_SIZES,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
        ctc_zero_infinity=True,
    ),
    "llama for classes": _language("LlamaForSequenceClassification", _sentences, num_labels=3),
    "gpt2 for classes": _language("GPT2ForSequenceClassification", _sentences, num_labels=3),
    "gpt2 for a number": _language(
        "GPT2ForSequenceClassification",
        lambda: _sentences(numbers=True),
        num_labels=1,
        problem_type="regression",
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Return a family's model in training mode, and its mini-batch as keyword arguments."""
    make, sample = FAMILIES[name]
    torch.manual_seed(0)
    model = make().to(dtype).train()
    given: dict[str, Any] = {k: v.to(dtype) if v.is_floating_point() else v for k, v in sample().items()}
    if name == "clip":
        given["return_loss"] = True
    return model, given
