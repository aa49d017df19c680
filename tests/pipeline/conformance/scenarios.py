"""Scenarios to train: models with their mini-batches and losses; each model can be cut anywhere."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from pipepart import Arguments
from pipepart.capture import flatten
from tests.capture import handwritten
from tests.pipeline.conformance import layers
from tests.pipeline.conformance.layers import WAYS_TO_MOVE, Moving, double
from tests.support import pieces, searched
from tests.support.pieces import WIDTH, linear
from tests.support.skipping import Hourglass, Woven
from tests.support.tied import Head, Rotated, language_model, loss_fn, words
from tests.support.two_parts import Calls

Batch = tuple[Any, Any]


def vectors(samples: int) -> Batch:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


@dataclass(frozen=True)
class Scenario:
    """A model and how its mini-batches are made."""

    make: Callable[[], nn.Module]  # the same model from the same seed of torch
    batch: Callable[[int], Batch] = vectors  # an input and a target of so many samples
    loss: Callable[..., Tensor] | None = None  # a mean over samples; if None, the runner chooses one
    draws: bool = False  # layers draw random numbers from torch's generator
    writes: bool = False  # layers write buffers, some of which are statistics of two samples or more
    by_batch: bool = False  # a layer sees more than one sample
    sparse: bool = False  # gradients or messages are sparse
    alone: bool = False  # a layer cannot be copied, so that there are no replicas
    on_host: bool = False  # a layer makes tensors on the host, which a strict device refuses
    shared: bool = False  # stages share parameters or buffers
    by_address: bool = False  # kernels for float32 round by the addresses of tensors
    recorded: int = 0  # layers of a model that is no chain, which to record takes seconds

    @functools.cached_property
    def layers(self) -> int:
        """The number of layers at whose borders the model can be cut."""
        return self.recorded or len(flatten(self.make()))


def among_others(make: Callable[[], list[nn.Module]]) -> Callable[[], nn.Sequential]:
    """Put the same layers twice among others: a chain of at least seven."""

    def chain() -> nn.Sequential:
        first, second = make(), make()
        return nn.Sequential(linear(), *first, nn.Tanh(), linear(), *second, linear(), nn.Sigmoid(), linear())

    return chain


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    """Return the layer with these parameters frozen, or all."""
    for name, parameter in layer.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return layer


def frozen_at(*places: int) -> Callable[[], nn.Sequential]:
    def chain() -> nn.Sequential:
        model = nn.Sequential(*[linear(), nn.LayerNorm(WIDTH), linear(), nn.Tanh(), linear(), linear()])
        for place in places:
            model[place].requires_grad_(False)
        return model

    return chain


def tied_ends() -> nn.Sequential:
    model = among_others(lambda: [linear()])()
    model[-1].weight = model[0].weight
    return model


def in_three_places(make: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Use one layer three times, so that its parameters are in several stages."""

    def chain() -> nn.Sequential:
        shared = make()
        return nn.Sequential(linear(), shared, nn.Tanh(), shared, linear(), shared, nn.Tanh())

    return chain


def packed() -> list[nn.Module]:
    packs = Calls(layers.packs, linear=nn.Linear(WIDTH, 2 * WIDTH))
    return [packs, nn.Identity(), Calls(layers.unpacks)]


def scripted() -> nn.Sequential:
    norm: Any = torch.jit.script(nn.BatchNorm1d(WIDTH))
    return nn.Sequential(linear(), norm, nn.Tanh(), linear(), nn.Tanh(), linear())


def sparse_and_dense() -> nn.Sequential:
    embedding = nn.Embedding(9, 4, sparse=True)
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Head(embedding.weight))


def shared_table() -> nn.Sequential:
    """Two layers that read one buffer, and one of them twice."""
    table = torch.randn(4)
    first = Rotated(table)
    return nn.Sequential(nn.Linear(WIDTH, 4), first, nn.Tanh(), Rotated(table), first, nn.Linear(4, WIDTH))


def passed_on(layer: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """A layer that may return its input itself, which the next layer writes over."""
    return lambda: nn.Sequential(linear(), layer(), double(), linear(), double(), linear())


def anything() -> nn.Sequential:
    """Draw a chain of two to four kinds of layers, some of them frozen and some linear layers tied."""
    choose = random.Random(torch.initial_seed())
    kinds = choose.choices(
        [one for one in KINDS if not (one.alone or one.sparse or one.on_host)], k=choose.randint(2, 4)
    )
    model = nn.Sequential(*(layer for kind in kinds for layer in kind.make().children()))
    alike = [layer for layer in model if type(layer) is nn.Linear and layer.bias is not None]
    one, other = choose.sample(alike, 2)
    other.weight = one.weight
    for layer in model:
        if choose.random() < 0.15:
            layer.requires_grad_(False)
    return model


def nest(samples: int) -> Batch:
    x = {
        "x": torch.randn(samples, WIDTH),
        "y": torch.randn(samples, 1),
        "mask": torch.rand(samples, WIDTH) > 0.5,
    }
    return x, torch.randn(samples, WIDTH)


def images(layout: str) -> Callable[[int], Batch]:
    def batch(samples: int) -> Batch:
        x = torch.randn(samples, 2, 4, 4)
        if layout == "channels last":
            x = x.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "strided":
            x = torch.randn(2 * samples, 2, 4, 4)[::2]
        elif layout == "expanded":
            x = x[:, :1].expand(samples, 2, 4, 4)
        return x, torch.randint(3, (samples,))

    return batch


def image_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 3)
    )


def pooled_images() -> nn.Sequential:
    """Saves indices, views, and what is written in place."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3))


def tokens(samples: int) -> Batch:
    return torch.randint(9, (samples, 3)), torch.randint(4, (samples,))


def woven_batch(samples: int) -> Batch:
    x, y = vectors(samples)
    return Arguments(x, torch.randint(3, (samples, WIDTH))), y


def pictures(samples: int) -> Batch:
    return torch.randn(samples, 3, 8, 8), torch.randn(samples, 2, 8, 8)


def masked(samples: int, by_name: bool) -> Batch:
    ids, mask = torch.randint(9, (samples, 3)), torch.randint(2, (samples, 3)).double()
    given = Arguments(ids=ids, mask=mask, scale=0.5) if by_name else Arguments(ids, mask)
    return given, torch.randn(samples, 3, WIDTH)


def embedded() -> nn.Sequential:
    return nn.Sequential(layers.Embeds(), linear(), nn.Tanh(), linear())


def sparse_messages() -> nn.Sequential:
    return nn.Sequential(
        linear(), layers.enters(), layers.convolves(), layers.convolves(), layers.leaves(), linear()
    )


CROSS_ENTROPY = nn.CrossEntropyLoss()
LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "no bias": lambda: [nn.Linear(WIDTH, WIDTH, bias=False)],
    "frozen": lambda: [frozen(linear())],
    "bias frozen": lambda: [frozen(linear(), "bias")],
    "norm": lambda: [nn.LayerNorm(WIDTH), nn.GELU()],
    "relu in place": lambda: [linear(), nn.ReLU(inplace=True)],
    "in place": lambda: [linear(), double()],
    "other layout": lambda: [Calls(lambda x: torch.cat([x[:, 3:], x[:, :3]], dim=1).t().contiguous().t())],
    "half detached": lambda: [Calls(lambda x: x + x.detach())],
    "views": lambda: [nn.Sequential(Calls(layers.halves), nn.Linear(WIDTH + WIDTH // 2, WIDTH))],
    "detached": lambda: [linear(), Calls(torch.detach)],
    "hook on its input": lambda: [Calls(layers.hooks_its_input)],
    "weight norm": lambda: [parametrizations.weight_norm(linear())],
    "differentiates": lambda: [Calls(layers.slope, inner=linear())],
    "checkpoint": lambda: [layers.checkpointed(reentrant=False)],
    "reentrant checkpoint": lambda: [layers.checkpointed(reentrant=True)],
    "embedding": lambda: [layers.tokens(sparse=False)],
    "attention": lambda: [pieces.Attention()],
    "transformer": lambda: [layers.transformer()],
    "turned": lambda: [layers.Turned(WIDTH, WIDTH)],
    "residual": lambda: [layers.forks(), layers.joins()],
}
WRITING: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [nn.BatchNorm1d(WIDTH)],
    "cumulative batch norm": lambda: [nn.BatchNorm1d(WIDTH, momentum=None), linear()],
    "spectral norm": lambda: [parametrizations.spectral_norm(linear())],
}
DRAWING: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [linear(), nn.Dropout(0.4)],
    "dropout in place": lambda: [linear(), nn.Dropout(0.3, inplace=True)],
    "noise": lambda: [pieces.Noise()],
    "random relu": lambda: [nn.RReLU()],
    "attention with dropout": lambda: [pieces.Attention(dropout=0.3)],
}
CHAINS: dict[str, Scenario] = {
    **{name: Scenario(among_others(make)) for name, make in LAYERS.items()},
    **{name: Scenario(among_others(make), writes=True) for name, make in WRITING.items()},
    **{name: Scenario(among_others(make), draws=True) for name, make in DRAWING.items()},
    **{
        f"buffer {how}": Scenario(
            among_others(lambda how=how: [Moving(how)]), writes=True, on_host="late" in how
        )
        for how in WAYS_TO_MOVE
    },
    "ways by its input": Scenario(
        among_others(lambda: [Calls(lambda x: x * 2 if bool(x.detach().sum() > 0) else x.sin())]),
        by_batch=True,
    ),
    "packed": Scenario(among_others(packed), by_batch=True),
    "hooks": Scenario(among_others(lambda: [layers.hooked()]), by_batch=True, alone=True),
    "sparse embedding": Scenario(among_others(lambda: [layers.tokens(sparse=True)]), sparse=True),
    "old weight norm": Scenario(among_others(lambda: [nn.utils.weight_norm(linear())]), alone=True),
    "old spectral norm": Scenario(
        among_others(lambda: [nn.utils.spectral_norm(linear())]), writes=True, alone=True
    ),
    "generator of its own": Scenario(
        among_others(lambda: [layers.OwnGenerator()]), by_batch=True, alone=True, on_host=True
    ),
    "scripted batch norm": Scenario(scripted, writes=True, alone=True),
}
KINDS = list(CHAINS.values())
SCENARIOS: dict[str, Scenario] = {
    **CHAINS,
    "tied ends": Scenario(tied_ends, shared=True),
    "frozen front": Scenario(frozen_at(0, 1, 2)),
    "frozen end": Scenario(frozen_at(2, 4, 5)),
    "frozen ends": Scenario(frozen_at(0, 5)),
    "frozen but norms": Scenario(frozen_at(0, 2, 4, 5)),
    "passed on": Scenario(passed_on(nn.Identity)),
    "passed on as a view": Scenario(passed_on(lambda: Calls(lambda x: x.view(-1).view(-1, WIDTH)))),
    "passed on by a dropout in evaluation": Scenario(passed_on(lambda: nn.Dropout().eval())),
    "linear in three stages": Scenario(in_three_places(linear), shared=True),
    "transformer in three stages": Scenario(in_three_places(layers.transformer), shared=True),
    "gru in three stages": Scenario(in_three_places(pieces.Recurrent), shared=True),
    "weight norm in three stages": Scenario(
        in_three_places(lambda: parametrizations.weight_norm(linear())), shared=True
    ),
    "checkpoint in three stages": Scenario(
        in_three_places(lambda: layers.checkpointed(reentrant=False)), shared=True
    ),
    "embedding tied to a head": Scenario(language_model, words, loss_fn, shared=True),
    "sparse gradient meets a dense one": Scenario(sparse_and_dense, words, loss_fn, sparse=True, shared=True),
    "buffer of two stages": Scenario(shared_table, shared=True),
    "input is a nest": Scenario(
        lambda: nn.Sequential(Calls(lambda x: x["x"] * x["mask"] + x["y"]), linear(), nn.Tanh(), linear()),
        nest,
    ),
    "tokens": Scenario(
        lambda: nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Flatten(), nn.Linear(18, 4)),
        tokens,
        CROSS_ENTROPY,
    ),
    **{
        f"{layout} input": Scenario(
            image_model, images(layout), CROSS_ENTROPY, by_address=layout == "channels last"
        )
        for layout in ("channels last", "transposed", "strided", "expanded")
    },
    "arguments": Scenario(embedded, lambda samples: masked(samples, False)),
    "keywords": Scenario(embedded, lambda samples: masked(samples, True)),
    "sparse messages": Scenario(sparse_messages, sparse=True),
    "pooled images": Scenario(pooled_images, images("contiguous"), CROSS_ENTROPY, draws=True, writes=True),
    "all at once": Scenario(searched.network, draws=True, writes=True),
    "anything": Scenario(anything, draws=True, writes=True, by_batch=True),
    "hourglass": Scenario(lambda: Hourglass(4), vectors, functional.mse_loss, recorded=8),
    "woven": Scenario(Woven, woven_batch, functional.mse_loss, recorded=9),
    "u-net": Scenario(handwritten.UNet, pictures, functional.mse_loss, recorded=15),
}
