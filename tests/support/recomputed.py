"""The same training with and without recomputation, to compare everything that it leaves behind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand

MODES: tuple[Recompute, ...] = ("except-last", "always")


def trained(
    model: nn.Sequential,
    recompute: Recompute,
    *,
    borders: tuple[int, ...] = (3, 6),
    steps: int = 2,
    chunks: int = 1,
    schedule: str = "1f1b",
    loss_fn: Any = None,
    data: Callable[[], tuple[Any, Any]] = lambda: (torch.randn(11, 6), torch.randint(3, (11,))),
) -> dict[str, Any]:
    """Everything that some seeded steps leave behind."""
    ours = plain.twin(model)
    found: dict[str, Any] = {}
    torch.manual_seed(1)
    with cut_by_hand(
        ours,
        borders,
        loss_fn=loss_fn or nn.CrossEntropyLoss(),
        micro_batches=4,
        recompute=recompute,
        schedule=schedule,
        chunks=chunks,
    ) as pipe:
        for step in range(steps):
            x, y = data()
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
            found[f"loss {step}"] = pipe.step(x, target=y)
            found[f"input {step}"] = x.grad if isinstance(x, Tensor) else None
    return (
        found | plain.gradients(ours) | dict(ours.named_buffers()) | {"random": torch.get_rng_state().float()}
    )


def check_all_modes(model: nn.Sequential, **options: Any) -> None:
    once = trained(model, "never", **options)
    for mode in MODES:
        plain.assert_same(trained(model, mode, **options), once)
