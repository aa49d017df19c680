"""Makes the pictures of the README and of docs/report.md from a measured training: ``make pictures``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import pipepart
from examples.digits import model

STATIC = Path(__file__).parent / "_static"
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def measured_step() -> pipepart.Trace:
    """Train the network of examples/digits.py on two devices, one of half the speed; return the trace."""
    torch.manual_seed(0)
    net, x, y, loss_fn = model()
    profile = pipepart.profile(net, x, target=y, loss_fn=loss_fn, micro_batches=4, threads=1)
    cluster = pipepart.Cluster.virtual(2, speed=[1.0, 0.5], threads=1)
    plan = pipepart.plan(profile, cluster, schedule="1f1b", micro_batches=4, stages=2)
    with pipepart.Pipeline(net, plan, loss_fn) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        with pipe.trace() as trace:
            for _ in range(9):
                pipe.step(x, target=y)
    return trace


def screenshot(page_text: str, path: Path) -> None:
    """Save the first part of a report as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        file = Path(folder) / "report.html"
        file.write_text(page_text, encoding="utf-8")
        browser = started.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        page.screenshot(path=path)
        browser.close()


def main() -> None:
    """Write ``uneven.svg`` and ``report.png`` into docs/_static."""
    trace = measured_step()
    trace.svg(STATIC / "uneven.svg", width=860)
    screenshot(trace.to_html(), STATIC / "report.png")


if __name__ == "__main__":
    main()
