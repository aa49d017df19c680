"""Pipelines on given torch devices, and their numbers on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.vdev import devices as vdev
from tests.vdev import races

TWO = ("vdev:0", "vdev:1")
SHARED = ("vdev:0", "vdev:0")  # one device of two workers
THREE = ("vdev:0", "vdev:1", "vdev:2")


def cut_on(
    devices: Sequence[str],
    model: Any,
    borders: Sequence[int],
    loss_fn: Any = None,
    *,
    micro_batches: int = 4,
    **how: Any,
) -> Pipeline:
    """As :func:`tests.support.chains.cut_by_hand`, on these devices."""
    return cut_by_hand(model, borders, loss_fn=loss_fn, micro_batches=micro_batches, devices=devices, **how)


@contextmanager
def late() -> Iterator[None]:
    """Let simulated devices run as late as they can, and fail if two accesses to memory have no order.

    The pipeline has to be made within ``hosts.tracked``, as the fixture ``late_devices`` does.
    """
    with races.refused(), vdev.delayed(lateness=1.0):
        yield


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of the parameters, on the CPU."""
    return {name: None if g is None else g.cpu() for name, g in plain.gradients(model).items()}
