"""The report of a real run in a browser: its figures have marks, timelines zoom, tables sort, and names stay text."""

from collections.abc import Callable

import pytest

from pipepart import Trace, plan
from pipepart.reporting.report import Run, report_html
from tests.support.browser import OpenedPage

Opened = Callable[..., OpenedPage]


@pytest.fixture(scope="module")
def report(opened: Opened, traced: Trace) -> OpenedPage:
    """One page for the tests that leave it as it was."""
    return opened(traced)


def test_the_report_of_a_run_shows_all_sections_with_marks(report: OpenedPage):
    links = report.texts("nav a")
    assert report.texts("main h2") == links
    assert links[:5] == ["Summary", "Timelines", "Memory", "Stages", "Layers"]
    widths = report.page.locator("#timelines .row rect[class*=kind]").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().width)"
    )
    assert len(widths) == 2 * 2 * 2 * 4
    assert min(widths) > 0
    tips = report.page.locator("#timelines .row title").all_text_contents()
    assert any(tip.startswith("idle for") and "until 0F0 on virtual:0 ends" in tip for tip in tips)
    assert report.page.locator("#layers svg g").count() == 10


def test_columns_sort_by_their_numbers_with_mouse_and_keys(report: OpenedPage):
    table = report.page.locator("#layers table")
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


def test_all_timelines_zoom_and_scroll_together(report: OpenedPage):
    views = report.page.locator(".zooms")

    def widths() -> list[int]:
        return views.evaluate_all("all => all.map(view => view.scrollWidth)")

    before = widths()
    assert len(before) == 2
    for _ in range(2):
        report.page.get_by_role("button", name="Zoom in").click()
    assert widths() == [4 * width for width in before]
    lefts = views.evaluate_all("all => all.map(view => view.scrollLeft)")
    assert lefts[0] > 0
    assert len(set(lefts)) == 1
    views.last.evaluate("view => { view.scrollLeft = 10; return new Promise(requestAnimationFrame); }")
    views.first.evaluate("view => new Promise(requestAnimationFrame)")
    assert views.first.evaluate("view => view.scrollLeft") == 10
    report.page.get_by_role("button", name="Whole step").click()
    assert widths() == before


@pytest.mark.slow
def test_axe_finds_nothing_serious(opened: Opened, traced: Trace):
    assert serious_violations(opened(traced)) == []


@pytest.mark.slow
def test_two_plans_stand_side_by_side_in_the_dark_and_in_a_narrow_window(opened: Opened, traced: Trace):
    """Tables scroll, not the page."""
    assert traced.plan.profile is not None
    other = plan(traced.plan.profile, traced.plan.cluster, schedule="gpipe", micro_batches=4)
    page = report_html(Run(traced.plan, traced, "before"), Run(other, None, "after"))
    report = opened(page, theme="dark", width=400)
    assert report.page.evaluate("document.documentElement.scrollWidth") == 400
    assert report.page.locator(".zooms").count() == 3
    assert report.page.locator("#layers .bands").count() == 2
    assert serious_violations(report) == []


def serious_violations(report: OpenedPage) -> list[tuple[str, str]]:
    """Return what axe-core finds on a page with all its tables open: the rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    for details in report.page.locator("details").all():
        details.evaluate("details => { details.open = true; }")
    found = axe.Axe().run(report.page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], each["nodes"][0]["html"]) for each in serious]
