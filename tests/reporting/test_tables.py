"""Tables fit the terminal, fold layers that repeat, and keep names as text: no markup, no escape codes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Plan, Profile, reporting
from pipepart.reporting import show
from pipepart.reporting.folding import fold
from pipepart.reporting.table import Column, FittingTable, labelled_lines

Printed = Callable[[RenderableType], str]


@pytest.mark.parametrize("width", [60, 100, 140])
def test_tables_fit_and_cells_are_whole_or_their_column_is_named(
    printed: Printed, profile: Profile, two_stages: Plan, four_chunks: Plan, again: Plan, width, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    tables = [reporting.layer_table(profile), reporting.size_table(profile)]
    for made in (two_stages, four_chunks, again):
        timed = reporting.idle_table(made.simulate(), [device.name for device in made.workers])
        tables += [
            reporting.stage_table(made),
            reporting.memory_table(made),
            reporting.alternatives_table(made),
            timed,
        ]
    for table in tables:
        text = printed(table)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        left_out = " ".join(text.partition("Not shown")[2].split())
        for column in table.columns:
            if not column.folds and column.called not in left_out:
                assert all(cell in text for cell in column.cells)
    text = " ".join(printed(reporting.layer_table(profile)).split())
    assert ("Not shown at this width: output shape, spread" in text) == (width < 140)


def test_a_long_name_is_folded_not_cut(printed: Printed, profile: Profile, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first_column = [line.split(" ")[0] for line in printed(reporting.layer_table(profile)).splitlines()]
    assert "body.a_layer_with_a_very_long_name.attention" in "".join(first_column)
    monkeypatch.setenv("COLUMNS", "20")
    columns = [Column(str(number), ["bit for bit"]) for number in range(3)]
    lines = printed(FittingTable("Numbers", columns)).splitlines()
    assert sum(line.count("bit") for line in lines) == 6


def test_a_file_gets_every_column_no_colour_and_signs_that_it_can_hold(
    printed: Printed, profile: Profile
) -> None:
    text = printed(reporting.layer_table(profile))
    assert "\x1b" not in text
    assert "Not shown" not in text
    assert not re.search(r" +\n", text)
    held = io.BytesIO()
    with io.TextIOWrapper(held, encoding="ascii") as file:
        show(reporting.layer_table(profile), file=file)
        plain = held.getvalue().decode("ascii").splitlines()
    assert "######" in "".join(plain)
    assert "?" not in "".join(plain)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_is_filled_and_has_colours_unless_they_are_unwanted(
    two_stages: Plan, columns: int, monkeypatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    drawing = reporting.drawn_timeline(two_stages.simulate())
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(drawing, file=(coloured := Terminal()))
    monkeypatch.setenv("NO_COLOR", "1")
    show(drawing, file=(plain := Terminal()))
    colour, style = r"\x1b\[[\d;]*3\dm", r"\x1b\[[\d;]*m"
    assert re.search(colour, coloured.getvalue())
    assert not re.search(colour, plain.getvalue())
    lines = re.sub(style, "", plain.getvalue()).splitlines()
    assert (
        max(map(len, lines))
        == max(len(line) for line in lines if line.startswith("0 |"))
        == min(columns, 140)
    )


def test_names_stay_text_wherever_they_stand(two_stages: Plan, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    name = "gpu[red]\x1b[31m[/b]"
    shown = "gpu[red]\\x1b[31m[/b]"
    reports = [
        labelled_lines(name, [(name, name)]),
        FittingTable(name, [Column(name, [name], text=True), Column("b", ["1"])], notes=[name]),
        reporting.drawn_timeline(two_stages.simulate(), devices=[name, "virtual:1"]),
        name,
    ]
    counts = []
    for report in reports:
        file = Terminal()
        show(report, file=file)
        assert "\x1b[31m" not in file.getvalue()
        counts.append(file.getvalue().count(shown))
    assert counts == [3, 4, 1, 1]


def test_every_layer_is_in_one_fold_whatever_its_name():
    names = ["", ".", "7", "a.b.", "x9y", "1.", "2.", "\n3", "3", "4.4.4", "4.4.5", "4.5", "8", "9"]
    found = fold(names)
    assert [each.first for each in found] == [
        sum(other.layers for other in found[:at]) for at in range(len(found))
    ]
    assert sum(each.layers for each in found) == len(names)
    assert fold([]) == []
