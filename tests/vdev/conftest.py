"""Enables the simulated devices for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.vdev import devices as vdev


@pytest.fixture(autouse=True)
def late_devices() -> Iterator[None]:
    reason = vdev.reason_unavailable()
    if reason:
        pytest.skip(reason)
    vdev.load(devices=8)
    yield
    for index in range(8):
        vdev.set_capacity(f"vdev:{index}", None)
    vdev.hide()
