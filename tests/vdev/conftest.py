"""Fixtures that enable the simulated devices for the tests of this folder only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vdev import devices as vdev


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))  # the first of them may wait for the compiler


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    reason = vdev.reason_unavailable()
    if reason:
        pytest.skip(reason)
    vdev.load(devices=8)
    yield
    for index in range(8):
        vdev.set_capacity(f"vdev:{index}", None)
    vdev.hide()
