"""Late devices, and a clean start, for the tests that ask for them."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.vdev import devices as vdev
from tests.vdev import hosts


@pytest.fixture(scope="module")
def _frozen() -> None:
    """Leave what other tests hold out of the collections of these, each of which would take a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def collected(_frozen: None) -> None:
    """Collect what other tests have left, as threads of pipelines that nobody holds."""
    gc.collect()


@pytest.fixture
def late_devices() -> Iterator[None]:
    """``vdev:0`` to ``vdev:7``, whose streams run late and in a checked order within ``late``.

    To move there a parameter stays the object that it is, as on CUDA, which torch must be told for such devices.
    """
    reason = vdev.reason_unavailable()
    if reason:
        pytest.skip(reason)
    vdev.load(devices=8)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with hosts.tracked():
        yield
    torch.__future__.set_swap_module_params_on_conversion(before)
    vdev.hide()
