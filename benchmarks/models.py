"""The benchmarked models, each with a mini-batch and a loss; every process builds equal copies."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model that every framework can take: a flat `nn.Sequential`, and a loss that is a mean."""

    name: str
    model: nn.Sequential
    sample: Tensor
    target: Tensor
    loss_fn: LossFn


def build(name: str) -> Workload:
    """The workload called `name`; the same parameters and data at every call, in every process."""
    if name not in BUILDERS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(BUILDERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()


def _mlp16() -> Workload:
    layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    batch = torch.randn(256, 1024)
    return Workload("mlp16", nn.Sequential(*layers), batch, torch.randn(256, 1024), functional.mse_loss)


def _unequal() -> Workload:
    widths = [512, 2048, 2048, 128, 128, 128, 1024, 1024, 1024, 64, 2048, 256, 10]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return Workload(
        "unequal", model, torch.randn(256, 512), torch.randint(10, (256,)), functional.cross_entropy
    )


def _convnet() -> Workload:
    widths = [3, 32, 32, 64, 64, 64, 64, 128, 128, 128, 128]
    layers: list[nn.Module] = []
    for index, (channels, out_channels) in enumerate(itertools.pairwise(widths)):
        stride = 2 if index in (2, 6) else 1
        # No bias: BatchNorm cancels it, and its gradient is rounding noise that no two frameworks agree on.
        convolution = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return Workload("convnet", nn.Sequential(*layers), images, labels, functional.cross_entropy)


VOCABULARY, WIDTH, HEADS, BLOCKS, SEQUENCE = 8192, 256, 8, 8, 128


def _gpt() -> Workload:
    model = nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCABULARY))
    tokens = torch.randint(VOCABULARY, (16, SEQUENCE + 1))
    return Workload("gpt", model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), next_token_loss)


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over every token of every sequence."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Embedding(nn.Module):
    """Tokens and their places, as vectors."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, sequence: int = SEQUENCE) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(sequence, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.feed_forward_norm(x))


def _tiny() -> Workload:
    # So little arithmetic that a step is the framework's own work: 64 micro-batches of 8 samples.
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return Workload("tiny", model, torch.randn(512, 8), torch.randn(512, 8), functional.mse_loss)


BUILDERS: dict[str, Callable[[], Workload]] = {
    "mlp16": _mlp16,
    "gpt": _gpt,
    "convnet": _convnet,
    "unequal": _unequal,
    "tiny": _tiny,
}
RACED = ("mlp16", "gpt", "convnet", "unequal")
