"""Tables of layers, sizes, stages and memory."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Plan, Profile
from pipepart.reporting import (
    alternatives_table,
    idle_table,
    layer_table,
    memory_table,
    show,
    size_table,
    stage_table,
)
from pipepart.reporting.table import Column, FittingTable

Printed = Callable[[RenderableType], str]
WIDTHS = (80, 100, 140)


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_a_layer_shows_its_times_in_one_unit_and_its_sizes(printed: Printed, profile: Profile) -> None:
    shown = " ".join(row(printed(layer_table(profile)), "embedding"))
    assert shown == (
        "embedding Linear 16×8×4 1.250 10% – 2.000 10% 26% ██████▌ 1.5 KiB 4.0 KiB 2.0 KiB 3.0 KiB"
    )


def test_what_is_too_short_for_the_unit_is_not_shown_as_nothing(printed: Printed, profile: Profile) -> None:
    costs = profile.costs[0]
    brief = costs.layers[2].model_copy(
        update={"forward": costs.layers[2].forward.model_copy(update={"seconds": 1e-8})}
    )
    short = costs.model_copy(update={"layers": (*costs.layers[:2], brief)})
    text = printed(layer_table(profile.model_copy(update={"costs": (short,)})))
    assert "<0.001" in row(text, "head")


def test_the_loss_has_a_row_and_all_is_added_up(printed: Printed, profile: Profile) -> None:
    text = printed(layer_table(profile))
    assert row(text, "loss")[:5] == ["loss", "0.500", "10%", "0.750", "10%"]
    assert row(text, "total")[:4] == ["total", "3.752", "5.750", "3.000"]


def test_memory_that_layers_share_is_once_in_the_total(printed: Printed, profile: Profile) -> None:
    text = printed(layer_table(profile))
    assert " ".join(row(text, "total")).endswith("2.0 MiB 8.0 KiB 3.0 KiB")
    assert "once in the total" in text


def test_alike_blocks_are_one_row_with_their_sums(printed: Printed, profile: Profile) -> None:
    first, body, head = profile.layers
    costs = profile.costs[0]
    blocks = tuple(body.model_copy(update={"name": f"blocks.{index}"}) for index in range(4))
    repeated = profile.model_copy(
        update={
            "layers": (first, *blocks, head),
            "costs": (
                costs.model_copy(
                    update={"layers": (costs.layers[0], *[costs.layers[1]] * 4, costs.layers[2])}
                ),
            ),
        }
    )
    text = printed(layer_table(repeated, folded=True))
    assert " ".join(row(text, "blocks")) == (
        "blocks.0 – 3, 4 alike Attention 16×8×4 8.00 10% 4.00 10% 4.00 10% 65% ████████ "
        "8.0 MiB 32.0 KiB 2.0 KiB 3.0 KiB"
    )
    assert "--json has each layer" in text
    three = repeated.model_copy(
        update={
            "layers": (*blocks[:3], head),
            "costs": (costs.model_copy(update={"layers": (*[costs.layers[1]] * 3, costs.layers[2])}),),
        }
    )
    assert printed(layer_table(three, folded=True)) == printed(layer_table(three))


def test_shapes_are_those_of_the_size_that_is_shown(printed: Printed, profile: Profile) -> None:
    assert "8×8×4" in row(printed(layer_table(profile, 4)), "embedding")


def test_a_size_that_was_not_profiled_is_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match="not for 3"):
        layer_table(profile, 3)


def test_sizes_are_compared_by_the_whole_mini_batch(printed: Printed, profile: Profile) -> None:
    text = printed(size_table(profile))
    assert row(text, "2 ")[:4] == ["2", "16", "12.50", "25.00"]
    assert row(text, "4 ")[:4] == ["4", "8", "12.50", "50.01"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(
    printed: Printed, profile: Profile, two_stages: Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for table in (
        layer_table(profile),
        size_table(profile),
        stage_table(two_stages),
        memory_table(two_stages),
    ):
        assert max(map(len, printed(table).splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_cell_is_cut_off(
    printed: Printed,
    two_stages: Plan,
    four_chunks: Plan,
    again: Plan,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for made in (two_stages, four_chunks, again):
        timeline = made.simulate()
        timed = idle_table(timeline, [device.name for device in made.workers])
        tables = (stage_table(made), memory_table(made), alternatives_table(made), timed)
        for table in tables:
            text = printed(table)
            assert max(map(len, text.splitlines())) <= width
            # What cannot fold is there as a whole, or its column is named below.
            left_out = text.partition("Not shown")[2]
            for column in table.columns:
                if not column.folds and column.called not in " ".join(left_out.split()):
                    assert all(cell in text for cell in column.cells)


@pytest.mark.parametrize("width", [60, *WIDTHS])
def test_columns_that_have_no_room_are_named_and_the_rest_is_whole(
    printed: Printed, profile: Profile, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = printed(layer_table(profile))
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = printed(layer_table(profile))
    assert "…" not in narrow
    assert (
        {"embedding", "1.250", "2.000", "26%"} <= set(row(narrow, "embedding")) <= set(row(wide, "embedding"))
    )
    assert ("Not shown at this width: output shape, spread" in " ".join(narrow.split())) == (width < 140)


def test_a_long_name_is_folded_not_cut(
    printed: Printed, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first_column = [line.split(" ")[0] for line in printed(layer_table(profile)).splitlines()]
    assert "body.a_layer_with_a_very_long_name.attention" in "".join(first_column)


def test_a_file_gets_every_column_and_no_colour(
    printed: Printed, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(layer_table(profile))
    assert "\x1b" not in text
    assert "Not shown" not in text
    assert not re.search(r" +\n", text)


def test_a_file_of_another_encoding_gets_what_it_can_hold(profile: Profile) -> None:
    held = io.BytesIO()
    file = io.TextIOWrapper(held, encoding="ascii")
    show(layer_table(profile), file=file)
    assert b"embedding" in held.getvalue()
    file.close()


def test_a_stage_shows_device_layers_load_and_its_share_of_the_bottleneck(
    printed: Printed, two_stages: Plan
) -> None:
    text = printed(stage_table(two_stages))
    assert row(text, "1 ")[:2] == ["1", "virtual:1"]
    assert "embedding" in " ".join(row(text, "0 "))
    assert "100%" in text


def test_stages_of_one_device_are_added_up(printed: Printed, four_chunks: Plan) -> None:
    text = printed(stage_table(four_chunks))
    assert row(text, "0, 2")[2:] == ["device:1", "2", "5.00", "–", "8.00", "–", "13.00", "100%", "████████"]
    assert row(text, "1, 3")[2:] == ["device:0", "2", "4.50", "2.75", "2.00", "–", "9.25", "71%", "█████▊"]
    assert "%" not in " ".join(row(text, "0 "))


def test_a_forward_that_is_run_again_has_its_column(printed: Printed, again: Plan, two_stages: Plan) -> None:
    text = printed(stage_table(again))
    assert "3.25 1.00 3.00 3.25 0.04 10.54" in " ".join(row(text, "0 "))
    assert "right before the backward of every micro-batch" in text
    assert "again" not in printed(stage_table(two_stages))


def test_the_memory_of_a_device_is_held_against_its_limit(printed: Printed, two_stages: Plan) -> None:
    text = printed(memory_table(two_stages))
    assert "64.0 MiB" in text
    assert row(text, "0 ")[2:9] == ["8.0", "MiB", "2", "×", "8.0", "KiB", "7.0"]


def test_the_memory_of_a_device_is_that_of_all_its_stages(printed: Printed, four_chunks: Plan) -> None:
    """While 0B0 runs, the gradients of 0B1, 0B2 and 0B3 wait, 2 KiB each; it works on another one, with 3 KiB."""
    text = printed(memory_table(four_chunks))
    assert " ".join(row(text, "0, 2")) == "0, 2 device:1 12.0 KiB – – 11.0 KiB 23.0 KiB 64.0 MiB <1%"
    assert "1, 3" in text


def test_what_is_kept_whole_is_told_from_inputs(printed: Printed, again: Plan) -> None:
    stages = tuple(
        stage.model_copy(
            update={"full_stashes": 1, "input_only": 3, "boundary_bytes": 1024, "stash_bytes": 8192}
        )
        for stage in again.stages
    )
    text = printed(memory_table(again.model_copy(update={"stages": stages})))
    assert "1 × 8.0 KiB + 3 × 1.0 KiB" in text


def test_devices_without_a_limit_have_no_limit_column(
    printed: Printed, profile: Profile, two_stages: Plan
) -> None:
    devices = tuple(d.model_copy(update={"memory_bytes": None}) for d in two_stages.cluster.devices)
    free = two_stages.model_copy(
        update={"cluster": two_stages.cluster.model_copy(update={"devices": devices})}
    )
    assert "limit" not in printed(memory_table(free))


def test_cells_are_folded_if_no_column_is_left_to_leave_out(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    columns = [Column(str(number), ["bit for bit"]) for number in range(3)]
    lines = printed(FittingTable("Numbers", columns)).splitlines()
    assert max(map(len, lines)) <= 20
    assert sum(line.count("bit") for line in lines) == 6


def test_names_cannot_send_escape_codes_to_the_terminal(printed: Callable[..., str]) -> None:
    table = FittingTable("Layers", [Column("layer", ["a\x1b[31mred"], text=True)])
    assert "a\\x1b[31mred" in printed(table)
    assert "\x1b" not in printed(table)
