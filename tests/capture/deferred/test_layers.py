"""Layers of torch and models of transformers: a deferred construction has the values of the plain one."""

import pytest
import torch
from torch import nn

from tests.capture.families import FAMILIES, quick
from tests.support.deferred import assert_same_values

parametrizations = nn.utils.parametrizations

LAYERS = {
    "linear": lambda: nn.Linear(20, 30),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "convolution": lambda: nn.Conv2d(3, 4, 3, groups=1),
    "transposed convolution": lambda: nn.ConvTranspose1d(3, 4, 3),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "padded embedding": lambda: nn.Embedding(10, 5, padding_idx=2),
    "bag": lambda: nn.EmbeddingBag(10, 3),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer norm": lambda: nn.LayerNorm(4),
    "rms norm": lambda: nn.RMSNorm(4),
    "prelu": lambda: nn.PReLU(),
    "lstm": lambda: nn.LSTM(4, 6, 2, proj_size=3),
    "gru": lambda: nn.GRU(4, 5, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 5)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
    "skipped init": lambda: nn.Sequential(
        nn.utils.skip_init(nn.Linear, 3, 3).requires_grad_(False).apply(_ones), nn.Linear(3, 3)
    ),
}


def _ones(layer: nn.Module) -> None:
    nn.init.ones_(layer.get_parameter("weight"))
    nn.init.ones_(layer.get_parameter("bias"))


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_torch(layer):
    assert_same_values(LAYERS[layer])


@pytest.mark.parametrize("family", quick(["gpt2", "t5", "mixtral"], FAMILIES))
def test_families_of_transformers(family):
    assert_same_values(FAMILIES[family][0])
