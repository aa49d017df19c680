"""The tables of the benchmark show the right figures for known samples."""

from rich.console import Console
from rich.table import Table

from benchmarks.quiet import Measurement
from benchmarks.race import Result
from benchmarks.rounds import Samples
from benchmarks.tables import overhead_table, step_table


def steps(milliseconds: float, cpu_milliseconds: float) -> Samples:
    return Samples([Measurement(None, milliseconds / 1e3, cpu_milliseconds / 1e3, foreign_seconds=0.0)])


RESULT = Result(
    model="tiny",
    micro_batches=50,
    cut=(("0", "1"), ("2", "3")),
    auto="zb-h1, 1 on 0, 3 on 1",
    samples={
        "plain": steps(100, 100),
        "plain, micro-batches": steps(120, 120),
        "pipepart 1f1b": steps(60, 140),
    },
    predicted_seconds={"pipepart 1f1b": [0.057, 0.054, 0.9]},
    gradient_errors={},
)


def rows(table: Table) -> dict[str, list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    lines = [[cell.strip() for cell in line.split("│")] for line in capture.get().splitlines() if "│" in line]
    return {cells[1]: cells[2:-1] for cells in lines}


def test_a_step_is_told_in_milliseconds_with_its_prediction_and_as_a_part_of_plain():
    found = rows(step_table(RESULT))
    # The prediction is the median, its error relative to the measurement.
    assert found["pipepart 1f1b"][:2] + found["pipepart 1f1b"][3:] == ["60.0", "0.60", "57.0", "-5.0 %"]
    assert found["plain"][3:] == ["", ""]
    assert str(step_table(RESULT).caption).endswith("auto: zb-h1, 1 on 0, 3 on 1")


def test_overhead_counts_the_actions_of_one_device_for_wall_and_of_all_for_cpu():
    # 50 micro-batches: 100 actions a device, 200 on both.
    assert rows(overhead_table(RESULT))["pipepart 1f1b"] == ["600", "-600", "700", "+100"]
    for table in (step_table, overhead_table):
        assert Console().measure(table(RESULT)).minimum <= 80
