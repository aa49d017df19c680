"""All that is printed is as the files in ``golden`` have it, fits the terminal, and keeps names as text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from difflib import ndiff
from pathlib import Path

import pytest
from rich.console import RenderableType

import schedules
from pipepart import Cluster, Plan, Profile, Trace, plan, reporting
from pipepart.capture import SharedTensor
from pipepart.planning import Alternative
from pipepart.reporting import BenchResult, show
from pipepart.reporting.folding import fold
from pipepart.reporting.table import Column, FittingTable, labelled_lines
from schedules import Kind, Timeline
from tests.support.golden import check_golden

Printed = Callable[[RenderableType], str]
GOLDEN = Path(__file__).parent / "golden"


def test_tables_of_a_profile(printed: Printed, profile: Profile) -> None:
    first, body, head = profile.layers
    costs = profile.costs[0]
    blocks = tuple(body.model_copy(update={"name": f"blocks.{index}"}) for index in range(4))
    alike = (costs.layers[0], *[costs.layers[1]] * 4, costs.layers[2])
    repeated = profile.model_copy(
        update={"layers": (first, *blocks, head), "costs": (costs.model_copy(update={"layers": alike}),)}
    )
    shown = [
        reporting.layer_table(profile),
        reporting.layer_table(profile, 4),
        reporting.size_table(profile),
        reporting.layer_table(repeated, folded=True),
    ]
    check_golden("\n".join(map(printed, shown)), GOLDEN / "profile.txt")
    with pytest.raises(ValueError, match="not for 3"):
        reporting.layer_table(profile, 3)


def two_replicas(made: Plan) -> Plan:
    """Two copies of two stages, the second on devices half as fast."""
    cluster = Cluster.parse(["64MiB", "64MiB", "64MiB@0.5", "64MiB@0.5"])
    stages = tuple(
        stage.model_copy(update={"device": f"device:{index}"}) for index, stage in enumerate(made.stages)
    )
    copies = {"cluster": cluster, "stages": stages, "replica_devices": (("device:2", "device:3"),)}
    return made.model_copy(update=copies).refreshed()


def mixed_recompute(made: Plan) -> Plan:
    """Stages that keep some micro-batches whole and of others only the input."""
    kept = {"full_stashes": 1, "input_only": 3, "boundary_bytes": 1024, "stash_bytes": 8192}
    return made.model_copy(update={"stages": tuple(each.model_copy(update=kept) for each in made.stages)})


def test_tables_of_stages_and_memory(
    printed: Printed, two_stages: Plan, four_chunks: Plan, again: Plan
) -> None:
    free = tuple(each.model_copy(update={"memory_bytes": None}) for each in two_stages.cluster.devices)
    unlimited = two_stages.cluster.model_copy(update={"devices": free})
    plans = {
        "two stages": two_stages,
        "several stages a device": four_chunks,
        "recompute": again,
        "two replicas": two_replicas(two_stages),
        "both directions": two_stages.model_copy(update={"schedule": "chimera"}).refreshed(),
    }
    tables = (reporting.stage_table, reporting.memory_table)
    texts = [f"# {name}\n{''.join(printed(table(each)) for table in tables)}" for name, each in plans.items()]
    texts.append(f"# some recompute\n{printed(reporting.memory_table(mixed_recompute(again)))}")
    no_limit = two_stages.model_copy(update={"cluster": unlimited})
    texts.append(f"# no limit\n{printed(reporting.memory_table(no_limit))}")
    check_golden("\n".join(texts), GOLDEN / "stages.txt")


def predicted_as(made: Plan, **figures: float) -> Plan:
    return made.model_copy(update={"prediction": made.predicted.model_copy(update=figures)})


def tied(made: Plan) -> Plan:
    """Layers of two stages share a parameter."""
    assert made.profile is not None
    shared = (SharedTensor(layer=made.stages[0].layers[0], name="weight", bytes=0),)
    *others, last = made.profile.layers
    layers = (*others, last.model_copy(update={"shared": shared}))
    return made.model_copy(update={"profile": made.profile.model_copy(update={"layers": layers})})


def test_summaries_differ_in_what_there_is_to_tell(
    printed: Printed, profile: Profile, two_stages: Plan, four_chunks: Plan, again: Plan
) -> None:
    """The first summary as a whole, of the others the lines that are not in it."""
    bottleneck = two_stages.predicted.bottleneck_seconds
    plans = {
        "asynchronous": plan(profile, two_stages.cluster, schedule="pipedream"),
        "shared parameter": tied(two_stages),
        "near the bound": predicted_as(two_stages, bottleneck_bound=bottleneck / 1.25),
        "no bound": predicted_as(two_stages, bottleneck_bound=0.0),
        "one device": plan(profile, Cluster.virtual(1), schedule="sequential", stages=1),
        "out of time": two_stages.model_copy(update={"out_of_time": True}),
        "unlike devices in another order": four_chunks,
        "many unused devices": plan(profile, Cluster.virtual(21), stages=2, schedule="1f1b"),
        "recompute": again,
        "replicas": two_replicas(two_stages),
        "by hand": two_stages.model_copy(update={"prediction": None}),
    }
    whole = printed(reporting.plan_summary(two_stages))
    texts = [whole]
    for name, each in plans.items():
        lines = ndiff(whole.splitlines(), printed(reporting.plan_summary(each)).splitlines())
        texts.append("\n".join([f"# {name}", *(line[2:] for line in lines if line.startswith("+ ")), ""]))
    check_golden("\n".join(texts), GOLDEN / "summaries.txt")


KEPT = Alternative(
    schedule="gpipe",
    micro_batches=4,
    chunks=1,
    stages=2,
    step_seconds=0.04,
    memory_bytes=2048,
    why="23.8% slower",
)
OTHERS = (
    KEPT,
    KEPT.model_copy(update={"stages": 3, "step_seconds": 0.05, "why": "54.8% slower"}),
    Alternative(schedule="hanayo", micro_batches=4, chunks=2, stages=4, why="does not fit"),
)


def test_alternatives_and_differences(printed: Printed, two_stages: Plan, again: Plan) -> None:
    made = two_stages.model_copy(update={"alternatives": OTHERS})
    shown = [
        reporting.alternatives_table(made),
        reporting.alternatives_table(made, compact=True),
        *reporting.difference_reports(two_stages, again, ("kept", "again")),
    ]
    check_golden("\n".join(map(printed, shown)), GOLDEN / "alternatives.txt")


def stretched(step: Timeline, factor: float) -> Timeline:
    """The same step at another pace."""
    starts, ends = ([[factor * time for time in row] for row in times] for times in (step.starts, step.ends))
    moved = [t._replace(start=factor * t.start, end=factor * t.end) for t in step.transfers]
    return Timeline(step.schedule, starts, ends, transfers=moved)


def late(step: Timeline, stage: int, seconds: float) -> Timeline:
    """The same step, the forwards of a stage longer: in it each action has more than enough room for that."""
    ends = [
        [end + seconds * (action.kind is Kind.F and action.stage == stage) for action, _, end in row]
        for row in step.rows
    ]
    return Timeline(step.schedule, step.starts, ends)


def test_measured_steps(printed: Printed, two_stages: Plan, four_chunks: Plan, again: Plan) -> None:
    step = two_stages.simulate()
    three = [stretched(step, factor) for factor in (2.0, 1.0, 1.25)]
    starts = [[start + 1e-4 * (row == 1) for start in line] for row, line in enumerate(step.starts)]
    ends = [[end + 1e-4 * (row == 1) for end in line] for row, line in enumerate(step.ends)]
    predicted = two_stages.predicted.step_seconds
    bench = BenchResult(
        model="Sequential", samples=32, steps=5, device="virtual:0", plain_seconds=0.05, micro_batched_seconds=0.06,
        pipeline_seconds=0.03, plan=two_stages,
    )  # fmt: skip
    shown = [
        reporting.trace_summary(Trace(two_stages, three)),
        reporting.action_table(Trace(two_stages, [late(step, 1, 0.5e-3)])),
        reporting.idle_table(step, ["virtual:0", "virtual:1"]),
        reporting.idle_table(Timeline(step.schedule, starts, ends, transfers=step.transfers)),
        *(reporting.measured_against_plan(two_stages, [predicted * factor]) for factor in (1.25, 1.0, 0.8)),
        reporting.drawn_timeline(step, devices=["virtual:0", "virtual:1"]),
        reporting.drawn_timeline(again.simulate()),
        reporting.drawn_timeline(
            four_chunks.simulate(), devices=[device.name for device in four_chunks.workers]
        ),
        reporting.drawn_timeline(two_replicas(two_stages).simulate()),
        reporting.bench_table(bench),
    ]
    check_golden("\n".join(map(printed, shown)), GOLDEN / "steps.txt")
    with pytest.raises(ValueError, match="at least 1"):
        reporting.measured_against_plan(two_stages, [])
    with pytest.raises(ValueError, match=r"run pipe\.step within"):
        reporting.trace_reports(Trace(two_stages))


def test_simulated_schedules_and_clusters(printed: Printed) -> None:
    def played(name: str, stash: tuple[int, int] = (1024, 2048)) -> Timeline:
        costs = schedules.StageCosts([1, 1], [1, 1], [1, 1], latency=0.5, stash_bytes=stash)
        return schedules.simulate(schedules.build(name, devices=2, micro_batches=4), costs)

    own = played("1f1b")
    boxes = Cluster.parse(["24GiB"], hosts=3, devices_per_host=2, link="300GB/s", network="25GB/s")
    shown = [
        *(reporting.simulation_summary(own, bound) for bound in (12.0, 17.0)),
        reporting.simulation_summary(played("pipedream")),
        reporting.idle_table(own, ["one", "two"]),
        reporting.idle_table(played("1f1b", stash=(1, 1)), in_flight=True),
        reporting.schedules_table([own, played("gpipe")], [max(own.peak_bytes)] * 2, memory="stash"),
        reporting.cluster_report(boxes),
        reporting.cluster_report(Cluster.parse(["24GiB", "16GiB@0.6"], link="12GB/s")),
    ]
    check_golden("\n".join(map(printed, shown)), GOLDEN / "simulated.txt")


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
