"""Every test starts from the same seed, on one thread, in no terminal."""

import random

import hypothesis
import numpy as np
import pytest
import torch

from tests.support.seeds import SEED


class _TorchNumbers:
    """Torch's generator, for hypothesis: an example that is tried again draws the same tensors again."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_NUMBERS = _TorchNumbers()  # hypothesis holds it weakly
hypothesis.register_random(_TORCH_NUMBERS)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


_BUILD_SECONDS = 600  # the first test that loads simulated devices may wait for the compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "late_devices" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_BUILD_SECONDS))


def pytest_report_header() -> str:
    return f"random cases of slow tests: PIPEPART_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of pytest-xdist may have set
    monkeypatch.delenv("LINES", raising=False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
