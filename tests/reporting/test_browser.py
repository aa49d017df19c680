"""The report of a real run in a browser: its figures have marks, timelines zoom, tables sort, and names stay text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pipepart import Cluster, Pipeline, Trace, plan, profile
from pipepart.reporting.report import Run, report_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

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


Opened = Callable[..., "Page"]


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Opens a report, and checks after the last test that all were silent: no error, no request, no dialog."""
    file = tmp_path_factory.mktemp("reports") / "report.html"
    pages: list[Page] = []
    faults: list[str] = []

    def request(url: str) -> None:
        if url.partition("#")[0] != file.as_uri() and not url.startswith("data:"):
            faults.append(f"request: {url}")

    def dialog(found: Dialog) -> None:
        faults.append(f"dialog: {found.message}")
        found.dismiss()

    def opened(html: str, **options: Any) -> Page:
        file.write_text(html, encoding="utf-8")
        page = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options}).new_page()
        pages.append(page)
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", dialog)
        page.on("request", lambda one: request(one.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield opened
    for each in pages:
        each.context.close()
    assert faults == []


@pytest.fixture(scope="module")
def report(opened: Opened, traced: Trace) -> Page:
    """One page for the tests that leave it as it was."""
    return opened(traced.to_html())


def test_the_report_of_a_run_shows_all_sections_with_marks(report: Page):
    links, titles = (
        [each.inner_text() for each in report.locator(where).all() if each.is_visible()]
        for where in ("nav a", "main h2")
    )
    assert titles == links
    assert links[:5] == ["Summary", "Timelines", "Memory", "Stages", "Layers"]
    widths = report.locator("#timelines .row rect[class*=kind]").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().width)"
    )
    assert len(widths) == 2 * 2 * 2 * 4
    assert min(widths) > 0
    tips = report.locator("#timelines .row title").all_text_contents()
    assert any(tip.startswith("idle for") and "until 0F0 on virtual:0 ends" in tip for tip in tips)
    assert report.locator("#layers svg g").count() == 10


def test_columns_sort_by_their_numbers_with_mouse_and_keys(report: Page):
    table = report.locator("#layers table")
    header = table.locator("th", has_text="forward").first
    column = header.evaluate("header => header.cellIndex")

    def numbers() -> list[float]:
        cells = table.locator("tbody tr").evaluate_all(
            "(rows, column) => rows.map(row => row.cells[column].dataset.value)", column
        )
        return [float(cell) for cell in cells]

    before = numbers()
    header.locator("button").click()
    assert numbers() == sorted(before, reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    header.locator("button").press("Enter")
    assert numbers() == sorted(before)
    assert header.get_attribute("aria-sort") == "ascending"
    kinds = table.locator("th", has_text="kind").first
    kinds.locator("button").click()
    assert header.get_attribute("aria-sort") is None
    words = table.locator("tbody tr td:nth-child(3)").all_inner_texts()
    assert words == sorted(words)
    assert table.locator("tfoot th").inner_text() == "total"


def test_all_timelines_zoom_and_scroll_together(report: Page):
    views = report.locator(".zooms")

    def widths() -> list[int]:
        return views.evaluate_all("all => all.map(view => view.scrollWidth)")

    before = widths()
    assert len(before) == 2
    for _ in range(2):
        report.get_by_role("button", name="Zoom in").click()
    assert widths() == [4 * width for width in before]
    lefts = views.evaluate_all("all => all.map(view => view.scrollLeft)")
    assert lefts[0] > 0
    assert len(set(lefts)) == 1
    views.last.evaluate("view => { view.scrollLeft = 10; return new Promise(requestAnimationFrame); }")
    views.first.evaluate("view => new Promise(requestAnimationFrame)")
    assert views.first.evaluate("view => view.scrollLeft") == 10
    report.get_by_role("button", name="Whole step").click()
    assert widths() == before


@pytest.mark.slow
def test_axe_finds_nothing_serious(opened: Opened, traced: Trace):
    assert serious_violations(opened(traced.to_html())) == []


@pytest.mark.slow
def test_two_plans_stand_side_by_side_in_the_dark_and_in_a_narrow_window(opened: Opened, traced: Trace):
    """Tables scroll, not the page."""
    assert traced.plan.profile is not None
    other = plan(traced.plan.profile, traced.plan.cluster, schedule="gpipe", micro_batches=4)
    page = report_html(Run(traced.plan, traced, "before"), Run(other, None, "after"))
    report = opened(page, color_scheme="dark", viewport={"width": 400, "height": 900})
    assert report.evaluate("document.documentElement.scrollWidth") == 400
    assert report.locator(".zooms").count() == 3
    assert report.locator("#layers .bands").count() == 2
    assert serious_violations(report) == []


def serious_violations(report: Page) -> list[tuple[str, str]]:
    """Return what axe-core finds on a page with all its tables open: the rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    for details in report.locator("details").all():
        details.evaluate("details => { details.open = true; }")
    found = axe.Axe().run(report).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], each["nodes"][0]["html"]) for each in serious]
