"""Pictures of timelines: what is drawn where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from schedules import Schedule, StageCosts, Timeline, build, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, devices: int = 4, micro_batches: int = 8) -> Timeline:
    schedule = build(name, devices, micro_batches)
    each = [1.0] * schedule.stages
    return simulate(schedule, StageCosts(each, each, each))


class Drawn(NamedTuple):
    name: str
    left: float
    top: float
    width: float
    fill: str


def boxes(svg: str) -> list[Drawn]:
    return [
        Drawn(
            tip.text.split(":")[0],
            float(rect.attrib["x"]),
            float(rect.attrib["y"]),
            float(rect.attrib["width"]),
            rect.attrib["fill"],
        )
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if (tip := rect.find(f"{SVG}title")) is not None and tip.text
    ]


def numbers(svg: str) -> list[str]:
    """Return the numbers of micro-batches, which stand above the axis."""
    texts = list(ElementTree.fromstring(svg).iter(f"{SVG}text"))
    axis = next(float(each.attrib["y"]) for each in texts if (each.text or "").startswith("time"))
    above = [each for each in texts if float(each.attrib["y"]) < axis and "text-anchor" in each.attrib]
    return sorted(str(each.text) for each in above)


def test_each_action_is_a_box_to_scale_on_the_row_of_its_device() -> None:
    drawn = boxes(timeline("1f1b", 2, 3).svg(width=900))
    rows = sorted({top for _, _, top, _, _ in drawn})
    assert len(rows) == 2
    by_name = {name: (left, rows.index(top), width) for name, left, top, width, _ in drawn}
    assert sorted(by_name) == sorted(
        f"{stage}{kind}{m}" for stage in (0, 1) for kind in "FB" for m in range(3)
    )
    assert {name: row for name, (_, row, _) in by_name.items()} == {name: int(name[0]) for name in by_name}
    second = by_name["0F1"][0] - by_name["0F0"][0]  # pixels
    assert by_name["0B0"][2] + 1 == pytest.approx(
        2 * second, abs=0.05
    )  # a backward takes as long as two forwards
    assert by_name["1F0"][0] == pytest.approx(by_name["0F1"][0])


def test_boxes_have_the_colour_of_their_kind_and_chunk_and_the_number_of_their_micro_batch() -> None:
    svg = timeline("zb-v").svg()
    colours: dict[tuple[str, bool], set[str]] = {}
    for name, *_, fill in boxes(svg):
        stage, kind, _ = re.split("([FIW])", name)
        colours.setdefault((kind, int(stage) >= 4), set()).add(fill)
    assert len(colours) == 6
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == 6
    assert numbers(svg) == sorted(str(m) for m in range(8) for _ in range(8 * 3))


def test_names_and_titles_stand_in_the_picture_safely(tmp_path: Path) -> None:
    svg = timeline("1f1b", 2, 2).svg(tmp_path / "a.svg", labels=["cuda:0", "<b>&\x07"], title="A & B")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == svg
    root = ElementTree.fromstring(svg)
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert {"cuda:0", "<b>& ", "A & B", "forward", "backward", "idle", "time (s)"} <= set(words)
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == "A & B"
    assert "2 stages on 2 devices, 2 micro-batches" in (root[1].text or "")
    assert "id" not in root.attrib


def test_a_schedule_without_actions_has_a_picture() -> None:
    assert "step of 0 s" in Timeline(Schedule("none", ((), ()), (0, 1), 0), ((), ()), ((), ())).svg()
