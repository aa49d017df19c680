"""Fixtures for CUDA tests: one device shared by several workers, and two devices if the machine has them."""

import pytest
import torch

SETS = {
    "one": ("cuda:0",),
    "shared by two": ("cuda:0", "cuda:0"),
    "shared by four": ("cuda:0",) * 4,
    "two": ("cuda:0", "cuda:1"),
    "two, and back": ("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = __file__.rsplit("/", 1)[0]
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
            )


@pytest.fixture(params=SETS, ids=lambda name: name.replace(", ", " ").replace(" ", "-"))
def devices(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found = SETS[request.param]
    if len(set(found)) > torch.cuda.device_count():
        pytest.skip(f"there are not {len(set(found))} CUDA devices")
    return found
