"""The report of a real run in a browser: it loads, its charts have marks, its tables sort, and names stay text."""

from collections.abc import Callable

import pytest

from pipepart import Plan, Trace, plan
from pipepart.reporting.report import Run, report_html
from tests.support.browser import OpenedPage

Opened = Callable[..., OpenedPage]

_HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def report(opened: Opened, traced: Trace) -> OpenedPage:
    """One page for the tests that leave it as it was."""
    return opened(traced)


def test_the_report_of_a_run_shows_all_sections_with_marks(report: OpenedPage):
    links = report.texts("nav a")
    assert report.texts("main h2") == links
    assert links == [
        "Summary",
        "Timelines",
        "Idle time",
        "Memory",
        "Stages",
        "Costs per layer",
        "Layer graph",
        "Rejected plans",
    ]
    canvases = report.drawn("main canvas")
    assert len(canvases) >= 3
    assert min(canvases) > 3
    assert report.page.locator("#costs .strip svg g").count() == 30
    assert report.page.locator("#graph svg[data-picture=layers] .node").count() == 10


def test_a_report_works_without_scripts(opened: Opened, traced: Trace):
    report = opened(traced, scripts=False)
    assert report.page.locator("#costs tbody tr").count() == 11
    assert report.page.locator("#costs table button").count() == 0
    assert "linear" in report.page.locator("#costs table").inner_text().lower()


def test_columns_sort_by_their_numbers_with_mouse_and_keys(report: OpenedPage):
    table = report.page.locator("#costs table")
    header = table.locator("th", has_text="forward").first
    column = header.evaluate("header => header.cellIndex")

    def numbers() -> list[float]:
        cells = table.locator("tbody tr").evaluate_all(
            "(rows, column) => rows.map(row => row.cells[column].dataset.value)", column
        )
        return [float(cell) for cell in cells if cell]

    before = numbers()
    header.locator("button").click()
    assert numbers() == sorted(before, reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    header.locator("button").press("Enter")
    assert numbers() == sorted(before)
    assert header.get_attribute("aria-sort") == "ascending"
    names = table.locator("th", has_text="layer").first
    names.locator("button").click()
    assert header.get_attribute("aria-sort") is None
    assert table.locator("tbody th").first.inner_text() == "0"
    assert table.locator("tfoot th").inner_text() == "total"


def test_tables_are_searched(report: OpenedPage):
    search = report.page.locator("#costs input[type=search]")
    search.fill("relu")
    assert len(report.texts("#costs tbody tr")) == 5
    assert report.texts("#costs [role=status]") == ["5 of 11 rows"]
    search.fill("")
    assert len(report.texts("#costs tbody tr")) == 11


def test_what_is_under_the_pointer_is_told(report: OpenedPage):
    report.page.locator("#graph svg[data-picture=layers] .node").first.hover()
    assert "Linear, stage 0" in report.page.locator(".tip").inner_text()
    timeline = report.page.locator("#timelines .chart").last
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    told = set()
    for part in range(8, 100):  # along the row of the first device, whose boxes are as wide as measured
        report.page.mouse.move(box["x"] + part / 100 * box["width"], box["y"] + 30)
        told.update(report.texts(".tip"))
    assert any("micro-batch 0" in words for words in told)


def test_all_timelines_zoom_together(report: OpenedPage):
    report.page.mouse.move(0, 0)
    before = report.pictures("#timelines canvas")
    assert len(before) == 2
    report.page.locator("#timelines button[name=in]").click()
    report.page.wait_for_timeout(200)
    after = report.pictures("#timelines canvas")
    assert all(one != other for one, other in zip(before, after, strict=True))
    report.page.locator("#timelines button[name=whole]").click()
    report.page.wait_for_timeout(200)
    assert report.pictures("#timelines canvas") == before


def test_the_layer_graph_changes_its_view_and_zooms(report: OpenedPage, traced: Trace):
    graph = report.page.locator("#graph")
    graph.get_by_role("button", name="Stages").click()
    stages = graph.locator("svg[data-picture=stages]")
    assert stages.is_visible()
    assert not graph.locator("svg[data-picture=layers]").is_visible()
    assert stages.locator(".stage").count() == len(traced.plan.stages)
    whole = stages.get_attribute("viewBox")
    graph.get_by_role("button", name="Zoom in").press("Enter")
    assert stages.get_attribute("viewBox") != whole
    graph.get_by_role("button", name="Fit").click()
    assert stages.get_attribute("viewBox") == whole


def test_hostile_names_stay_text(opened: Opened, traced: Trace):
    made = traced.plan
    assert made.profile is not None
    new = {info.name: f"{info.name}{_HOSTILE}" for info in made.profile.layers}
    layers = tuple(info.model_copy(update={"name": new[info.name]}) for info in made.profile.layers)
    stages = tuple(
        stage.model_copy(update={"layers": tuple(new[name] for name in stage.layers)})
        for stage in made.stages
    )
    profile = made.profile.model_copy(update={"layers": layers, "model": _HOSTILE})
    update = {"profile": profile, "stages": stages}
    named = Plan.model_validate(made.model_copy(update=update).model_dump())
    report = opened(Trace(named, traced.steps))
    for view in ("Stages", "Layers"):
        report.page.locator("#graph").get_by_role("button", name=view).click()
        report.page.locator("#graph svg:not([hidden]) g[data-tip]").last.hover()
    assert _HOSTILE in report.page.locator("#costs tbody th").first.inner_text()
    assert report.page.evaluate("window.hacked") is None
    assert report.page.locator("main img").count() == 0


def test_axe_finds_nothing_serious(opened: Opened, traced: Trace):
    assert serious_violations(opened(traced)) == []


LATE = """<script>
const unpack = Response.prototype.arrayBuffer;
let calls = 0;
Response.prototype.arrayBuffer = async function () {
  const late = calls++ === 0;
  const bytes = await unpack.call(this);
  if (late) await new Promise((done) => setTimeout(done, 100));
  return bytes;
};
</script>"""


def test_memory_is_drawn_on_the_axis_of_the_timelines_even_if_their_columns_come_last(
    opened: Opened, traced: Trace
):
    report = opened(str(traced.to_html()).replace("</title>", f"</title>{LATE}", 1))
    before = report.pictures("#memory canvas")
    report.page.evaluate("pipepart.axis.whole()")
    report.page.wait_for_timeout(100)
    assert report.pictures("#memory canvas") == before


def test_two_plans_stand_side_by_side(opened: Opened, traced: Trace):
    assert traced.plan.profile is not None
    other = plan(traced.plan.profile, traced.plan.cluster, schedule="gpipe", micro_batches=4)
    page = report_html(Run(traced.plan, traced, "before"), Run(other, None, "after"))
    report = opened(page, theme="dark")
    assert len(report.pictures("#timelines canvas")) == 3
    assert report.page.locator("#graph .graph").count() == 2
    assert report.texts("#costs figcaption")[-2:] == ["before: Stages", "after: Stages"]
    assert serious_violations(report) == []


def serious_violations(report: OpenedPage) -> list[tuple[str, str]]:
    """Return what axe-core finds on a page with all its tables open: the rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    for details in report.page.locator("details").all():
        details.evaluate("details => { details.open = true; }")
    found = axe.Axe().run(report.page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], each["nodes"][0]["html"]) for each in serious]


def test_all_sections_print(opened: Opened, traced: Trace):
    report = opened(traced, theme="dark")
    report.page.emulate_media(media="print")
    report.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    sections = report.page.locator("main > section")
    heights = sections.evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
    assert len(heights) == 8
    assert min(heights) > 60
    assert not report.page.locator("input[type=search]").first.is_visible()
    assert report.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert len(report.page.pdf()) > 20_000


def test_a_narrow_window_scrolls_tables_not_the_page(opened: Opened, traced: Trace):
    report = opened(traced, width=400)
    assert report.page.evaluate("document.documentElement.scrollWidth") == 400
    assert serious_violations(report) == []
