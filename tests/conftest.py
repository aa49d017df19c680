"""Fixtures for all tests: the same seed, one thread, and no terminal."""

import functools
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tests.support.seeds import set_seed

# What takes seconds to import is imported in functions: the process that has workers do the tests needs none of it.

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


# What a file of tests names that takes seconds to start or to import: a server that forks processes, or a library.
# One worker of pytest-xdist runs all tests of a group.
_GROUPS = {
    "tests.support.ranks": "ranks",
    "tests.support.processes": "scripts",
    "pytorch_lightning": "lightning",
    "PipelineTrainer": "Trainer",
}

_TORCH_NUMBERS = pytest.StashKey[object]()
_BUILD_SECONDS = 600  # the first test that loads simulated devices may wait for the compiler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of the random cases of slow tests (default: the time)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # workers of pytest-xdist are given what is set here
        config.option.seed = int(time.time())
    set_seed(config.option.seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random cases of slow tests: --seed {config.option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "late_devices" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_BUILD_SECONDS))
        if not isinstance(item, pytest.Function) or not item.get_closest_marker("slow"):
            continue
        if hypothesis.is_hypothesis_test(item.obj):
            # Its fixed cases are those of the test that is not slow.
            hypothesis.seed(f"{config.option.seed} {item.name}")(item.obj)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``--dist loadgroup``, send tests of a group to one worker; xdist's own does not with pytest 9.2."""
    if config.option.dist != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(config.rootpath / nodeid.partition("::")[0]) or nodeid

    return ByGroup(config, log)


@functools.cache
def _group_of(file: Path) -> str | None:
    text = file.read_text(encoding="utf-8")
    return next((group for name, group in _GROUPS.items() if name in text), None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let hypothesis know torch's generator: an example that is tried again draws the same tensors again.

    What all tests share is exempt from garbage collection: each ``gc.collect()`` would walk all of torch.
    """
    import torch

    class TorchNumbers:
        seed = staticmethod(torch.manual_seed)
        getstate = staticmethod(torch.get_rng_state)
        setstate = staticmethod(torch.set_rng_state)

    session.stash[_TORCH_NUMBERS] = numbers = TorchNumbers()  # hypothesis holds it weakly
    hypothesis.register_random(numbers)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import torch

    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of pytest-xdist may have set
    monkeypatch.delenv("LINES", raising=False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _searches_count_cpu_seconds() -> Iterator[None]:
    """Let searches count the seconds of this process, of which other programs do not take any."""
    from schedules.searching import clock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", SimpleNamespace(monotonic=time.process_time))
        yield


@pytest.fixture
def short_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles take 10 ms for each size, and find a runtime that is fast beside the small models of a test."""
    import pipepart
    from pipepart import measure
    from pipepart.profiling import Overhead

    monkeypatch.setitem(pipepart.profiling.profile.__kwdefaults__ or {}, "seconds", 0.01)
    fast = Overhead(action_seconds=25e-6, message_seconds=20e-6)
    monkeypatch.setattr(measure, "measured_overhead", lambda: fast)
