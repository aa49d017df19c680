"""Layers train to the numbers of the CPU, bit for bit, in normal mode and delayed."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.two_parts import Calls
from tests.vdev import devices as vdev


class Attention(nn.Module):
    def __init__(self, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.masked, self.dropout = masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril() if self.masked else None
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not self.masked, dropout_p=self.dropout
        )


class Recurrent(nn.Module):
    """The sequence that a recurrent layer returns, with its last state added; or of sequences of two lengths."""

    def __init__(self, layer: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            packed, _ = self.layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True))
            return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        sequence, state = self.layer(x)
        return sequence + (state[0] if isinstance(state, tuple) else state).sum()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x * 3).abs().long().clamp(max=9)) * x.unsqueeze(-1)


def permuted_dropout() -> nn.Module:
    return nn.Sequential(Calls(lambda x: x.permute(2, 0, 1)), nn.Dropout(0.37))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 8), (2, 3, 16)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2), (2, 4, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 9, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(16), (4, 16)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "causal": (Attention, (2, 6, 16)),
    "masked": (lambda: Attention(masked=True), (2, 6, 16)),
    "attention with dropout": (lambda: Attention(dropout=0.3), (2, 6, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16)),
    "gru": (lambda: Recurrent(nn.GRU(16, 8, 2, bidirectional=True)), (5, 2, 16)),
    "packed": (lambda: Recurrent(nn.LSTM(16, 8, batch_first=True), packed=True), (2, 5, 16)),
    "embedding": (Words, (4, 5)),
    "permuted dropout": (permuted_dropout, (6, 5, 4)),
    "channel dropout": (lambda: nn.Dropout2d(0.3), (8, 16, 2, 2)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)), (2, 3, 8, 8)),
    "activations": (lambda: nn.Sequential(nn.GELU(), nn.ReLU(inplace=True), nn.Softmax(-1)), (4, 16)),
    "upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), (4, 16)),
}
RECURRENT = {"gru", "packed"}  # which the host waits for

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01, foreach=True),
    "adam, one by one": lambda weights: torch.optim.Adam(weights, 0.01, foreach=False),
    "fused": lambda weights: torch.optim.Adam(weights, 0.01, fused=True),
}


def trained(device: str, name: str, optimizer: str) -> list[Tensor]:
    """Outputs, gradients of the input, and weights and buffers at the end of three steps."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    layer = layer.to(device)
    torch.manual_seed(1)  # the generator of a device stands where that of the CPU stands
    weights = list(layer.parameters())
    steps = OPTIMIZERS[optimizer](weights or [nn.Parameter(torch.zeros(1, device=device))])
    seen = []
    for _ in range(3):
        given = x.to(device, copy=True).requires_grad_()
        y = layer(given * 1)
        loss = (y * y * torch.arange(y.numel(), device=device).view(y.shape)).mean() + y.sum()
        loss.backward()
        assert given.grad is not None
        seen += [y.detach().clone(), given.grad]
        steps.step()
        steps.zero_grad()
    seen += [weight.detach() for weight in weights] + list(layer.buffers())
    assert {tensor.device for tensor in seen} == {torch.device(device)}
    return [tensor.cpu() for tensor in seen]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adamw") for name in LAYERS), *(("convolution", optimizer) for optimizer in OPTIMIZERS)],
)
@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.slow)], ids=["late", "at once"])
def test_a_layer_trains_as_on_the_cpu(name: str, optimizer: str, seed: int | None):
    expected = trained("cpu", name, optimizer)
    with contextlib.nullcontext() if seed is None else vdev.delayed(seed):
        found = trained("vdev:1", name, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in RECURRENT])
def test_a_step_is_launched_without_waiting(name: str):
    make, shape = LAYERS[name]
    layer, x = make().to("vdev:0"), torch.randn(shape).to("vdev:0").requires_grad_()
    weights = list(layer.parameters())
    with vdev.delayed(lateness=1.0):
        begun = torch.accelerator.current_stream("vdev:0").record_event()
        layer(x * 1).sum().backward()
        if weights:
            torch.optim.AdamW(weights).step()
        assert not begun.query()


def test_autocast_casts_by_the_lists_of_cuda():
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with torch.autocast("vdev", dtype=torch.bfloat16):
        y = layer.to("vdev:0")(x.to("vdev:0"))
        assert y.softmax(-1).dtype == torch.float32
    assert torch.equal(y.cpu(), expected)
