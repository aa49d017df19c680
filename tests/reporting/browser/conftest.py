"""A headless Chromium, and reports to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from pipepart import Cluster, Pipeline, Plan, Trace, plan, profile
from tests.support.browser import OpenedPage, Theme

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


# A module, not a session: while playwright runs, no other test could run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if _CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        # Its sandbox needs rights that a container does not give.
        found = started.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def traced() -> Trace:
    """Three measured steps of ten layers on two devices."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())))
    sample, target, loss_fn = torch.randn(16, 32), torch.randn(16, 32), nn.MSELoss()
    costs = profile(model, sample, loss_fn=loss_fn, target=target, micro_batches=4)
    made = plan(costs, Cluster.virtual(2, memory="64MiB"), schedule="1f1b", micro_batches=4, stages=2)
    with Pipeline(model, made, loss_fn=loss_fn) as pipe, pipe.trace() as trace:
        for _ in range(3):
            pipe.step(sample, target=target)
    return trace


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OpenedPage]]:
    """Opens a report, and checks after the last test that all were silent: no error, no request, no dialog."""
    pages: list[OpenedPage] = []
    folder = tmp_path_factory.mktemp("reports")

    def opened(
        shown: Plan | Trace | str, theme: Theme = "light", width: int = 1200, scripts: bool = True
    ) -> OpenedPage:
        file = folder / f"report{len(pages)}.html"
        file.write_text(shown if isinstance(shown, str) else shown.to_html(), encoding="utf-8")
        context = browser.new_context(
            color_scheme=theme, java_script_enabled=scripts, viewport={"width": width, "height": 900}
        )
        pages.append(OpenedPage(context.new_page(), file, scripts))
        return pages[-1]

    yield opened
    for each in pages:
        each.page.context.close()
    assert [fault for each in pages for fault in each.faults] == []
