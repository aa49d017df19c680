"""Models in plain PyTorch, cut into stages, against the plain model on the same micro-batches."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipepart import Arguments
from tests.capture import handwritten
from tests.capture.families import quick
from tests.support.recorded import assert_same_step


def _noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(*shape: int, high: int = 20, seed: int = 2) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _classes(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def _levels(output: list[torch.Tensor], target: list[torch.Tensor]) -> torch.Tensor:
    return sum((F.mse_loss(one, other) for one, other in zip(output, target, strict=True)), torch.zeros(()))


def _with_distance(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target) + 0.25 * output[1].mean()


def _words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


PADDING = torch.zeros(8, 6, dtype=torch.bool)
PADDING[:, -1] = True
CASES: dict[str, tuple[Any, ...]] = {  # sample, target, loss
    "UNet": (_noise(8, 3, 8, 8), _noise(8, 2, 8, 8, seed=3), F.mse_loss),
    "EncoderDecoder": (Arguments(_ids(8, 6), _ids(8, 5, seed=4), padding=PADDING), _ids(8, 5, seed=5), _words),
    "Experts": (_ids(8, 5), _ids(8, 5, seed=7), _words),
    "Recurrent": ({"ids": _ids(8, 6), "lengths": torch.tensor([6, 4, 5, 2, 3, 6, 1, 4])}, _ids(8, high=3), _classes),
    "Diffusion": (
        {"x": _noise(8, 3, 4, 4), "steps": _ids(8, high=10), "noise": _noise(8, 3, 4, 4, seed=8)}, None, None,
    ),
    "Gpt": ((_ids(8, 10), _ids(8, 10, seed=9)), None, None),
    "Pyramid": (
        ([_noise(8, 3, 8, 8), _noise(8, 4, 4, 4), _noise(8, 5, 2, 2)],),
        [_noise(8, 2, 8, 8, seed=10), _noise(8, 2, 4, 4, seed=11), _noise(8, 2, 2, 2, seed=12)], _levels,
    ),
    "Codebook": (_noise(8, 6), _noise(8, 6, seed=13), _with_distance),
}  # fmt: skip


HOW: list[tuple[Any, ...]] = [
    (2, "1f1b", "never", True),
    (3, "gpipe", "always", False),
    (4, "1f1b", "never", False),
    (3, "zb-h1", "never", False),
]
QUICK = [(name, index % len(HOW)) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "how"), quick(QUICK, itertools.product(CASES, range(len(HOW)))))
def test_gradients_are_those_of_plain_micro_batches(name, how):
    stages, schedule, recompute, strict = HOW[how]
    sample, target, loss_fn = CASES[name]
    torch.manual_seed(0)
    assert_same_step(
        getattr(handwritten, name)(),
        sample,
        target=target,
        loss_fn=loss_fn,
        stages=stages,
        parts=4,
        schedule=schedule,
        recompute=recompute,
        # The lengths of one are on the CPU, which is another device than a stage's.
        strict=strict and name != "Recurrent",
    )
