"""Layers train to the numbers of the CPU, bit for bit, in normal mode and delayed."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.vdev import devices as vdev


class Attention(nn.Module):
    def __init__(self, causal: bool = False, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.causal, self.masked, self.dropout = causal, masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril() if self.masked else None
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal, dropout_p=self.dropout
        )


class First(nn.Module):
    """The sequence that a recurrent layer returns, with its last state added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        sequence, state = self.layer(x)
        return sequence + (state[0] if isinstance(state, tuple) else state).sum()


class Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        packed, _ = self.layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True))
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x * 3).abs().long().clamp(max=9)) * x.unsqueeze(-1)


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(2, 0, 1)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 8), (2, 3, 16)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 9)),
    "strided": (lambda: nn.Conv2d(3, 8, 3, stride=2), (2, 3, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 9, 9)),
    "line": (lambda: nn.Conv1d(3, 8, 3), (2, 3, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(16), (4, 16)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "rms norm": (lambda: nn.RMSNorm(16), (4, 16)),
    "attention": (Attention, (2, 6, 16)),
    "causal": (lambda: Attention(causal=True), (2, 6, 16)),
    "masked": (lambda: Attention(masked=True), (2, 6, 16)),
    "attention with dropout": (lambda: Attention(dropout=0.3), (2, 6, 16)),
    "multi-head": (SelfAttention, (3, 2, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16)),
    "gru": (lambda: First(nn.GRU(16, 8, 2, bidirectional=True)), (5, 2, 16)),
    "lstm": (lambda: First(nn.LSTM(16, 8, 2, batch_first=True)), (5, 2, 16)),
    "rnn": (lambda: First(nn.RNN(16, 8)), (5, 2, 16)),
    "packed": (lambda: Packed(nn.LSTM(16, 8, batch_first=True)), (2, 5, 16)),
    "embedding": (Words, (4, 5)),
    "dropout": (lambda: nn.Dropout(0.3), (64, 16)),
    "permuted dropout": (lambda: nn.Sequential(Permuted(), nn.Dropout(0.37)), (6, 5, 4)),
    "channel dropout": (lambda: nn.Dropout2d(0.3), (8, 16, 2, 2)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)), (2, 3, 8, 8)),
    "activations": (
        lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.ReLU(inplace=True), nn.Softmax(-1)),
        (4, 16),
    ),
    "upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), (4, 16)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), (4, 16)),
}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01, foreach=True),
    "adam, one by one": lambda weights: torch.optim.Adam(weights, 0.01, foreach=False),
    "fused": lambda weights: torch.optim.Adam(weights, 0.01, fused=True),
}


def _trained(
    device: str, make: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: str = "adamw"
) -> list[Tensor]:
    """Outputs, gradients of the input, and weights and buffers at the end of three steps."""
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(shape)
    layer = layer.to(device)
    torch.manual_seed(1)  # the generator of a device stands where that of the CPU stands
    weights = list(layer.parameters())
    steps = OPTIMIZERS[optimizer](weights) if weights else None
    seen = []
    for _ in range(3):
        given = x.to(device, copy=True).requires_grad_()
        y = layer(given * 1)
        loss = (y * y * torch.arange(y.numel(), device=device).view(y.shape)).mean() + y.sum()
        loss.backward()
        assert given.grad is not None
        seen += [y.detach().clone(), given.grad]
        if steps is not None:
            steps.step()
            steps.zero_grad()
    seen += [weight.detach() for weight in weights] + list(layer.buffers())
    assert {tensor.device for tensor in seen} == {torch.device(device)}
    return [tensor.cpu() for tensor in seen]


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.slow)], ids=["late", "at once"])
def test_a_layer_trains_as_on_the_cpu(name: str, seed: int | None):
    make, shape = LAYERS[name]
    expected = _trained("cpu", make, shape)
    with contextlib.nullcontext() if seed is None else vdev.delayed(seed):
        assert _equal(_trained("vdev:1", make, shape), expected)


RECURRENT = {"gru", "lstm", "rnn", "packed"}  # which the host waits for


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_cpu(optimizer: str):
    make, shape = LAYERS["convolution"]
    expected = _trained("cpu", make, shape, optimizer)
    with vdev.delayed(0):
        assert _equal(_trained("vdev:1", make, shape, optimizer), expected)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss(), nn.MultiMarginLoss()],
)
def test_a_loss_is_that_of_the_cpu(loss_fn: nn.Module):
    x, target = torch.randn(6, 4), torch.randint(4, (6,))
    losses = []
    for device in ("cpu", "vdev:0"):
        given = x.to(device, copy=True).requires_grad_()
        loss = loss_fn(given, target.to(device))
        loss.backward()
        assert given.grad is not None
        losses.append((loss.item(), given.grad.cpu()))
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])


def test_autocast_casts_by_the_lists_of_cuda():
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with torch.autocast("vdev", dtype=torch.bfloat16):
        y = layer.to("vdev:0")(x.to("vdev:0"))
        assert y.softmax(-1).dtype == torch.float32
    assert torch.equal(y.cpu(), expected)


def test_recomputed_layers_draw_the_same_numbers_again():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()).to("vdev:1")
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(4)
        x = torch.ones(4, 8, device="vdev:1", requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)
