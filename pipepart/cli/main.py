"""The ``pipepart`` application with all its commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from .commands.bench import bench_command
from .commands.check import check_command
from .commands.cluster import cluster_command
from .commands.env import env_command
from .commands.explain import explain_command
from .commands.export import export_command
from .commands.plan import plan_command
from .commands.profile import profile_command
from .commands.replan import replan_command
from .commands.report import report_command
from .commands.simulate import simulate_command
from .errors import Commands

_COMMANDS = {
    "profile": (
        profile_command,
        "profile train.py:model --micro-batches 4,8 -o profile.json",
        "profile 'train.py:model(width=64)' --input 32x3x16x16",
    ),
    "plan": (
        plan_command,
        "plan train.py:model --devices 2 -o plan.json",
        "plan profile.json --device 24GiB --device 16GiB@0.6 --bandwidth 12GB/s",
    ),
    "explain": (explain_command, "explain plan.json --trace trace.json", "explain before.json after.json"),
    "simulate": (
        simulate_command,
        "simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1",
        "simulate --schedule 1f1b --schedule zb-v --devices 4 --micro-batches 8",
        "simulate plan.json --schedule zb-h1 -o step.svg",
    ),
    "report": (
        report_command,
        "report plan.json --trace trace.json -o report.html",
        "report before.json after.json",
    ),
    "export": (export_command, "export plan.json --to torchtitan -o exported"),
    "check": (check_command, "check train.py:model", "check train.py:model --plan plan.json"),
    "bench": (
        bench_command,
        "bench train.py:model --devices 2",
        "bench train.py:model --plan plan.json --trace trace.json",
    ),
    "replan": (replan_command, "replan plan.json --trace trace.json -o next.json"),
    "cluster": (
        cluster_command,
        "cluster -o cluster.json",
        "cluster --device 24GiB --hosts 2 --devices-per-host 4 --network 25GB/s",
    ),
    "env": (env_command, "env > environment.txt"),
}


def _examples(*lines: str) -> str:
    """Return example lines as the last part of a ``--help``."""
    return "Examples:\n\n" + "\n\n".join(f"`pipepart {line}`" for line in lines)


app = typer.Typer(
    name="pipepart",
    cls=Commands,
    no_args_is_help=True,
    epilog=_examples(
        "plan train.py:model --devices 2 -o plan.json",
        "explain plan.json",
        "check train.py:model --plan plan.json",
        "bench train.py:model --plan plan.json --trace trace.json",
        "report plan.json --trace trace.json",
    ),
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_command, *_lines) in _COMMANDS.items():
    app.command(_name, epilog=_examples(*_lines))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipepart {version('pipepart')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Measure a PyTorch model, cut it into pipeline stages, and predict what they cost."""
