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
from .grouped_help import GroupedCommand, ListedCommands

app = typer.Typer(
    name="pipepart",
    cls=ListedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("profile", cls=GroupedCommand)(profile_command)
app.command("plan", cls=GroupedCommand)(plan_command)
app.command("explain", cls=GroupedCommand)(explain_command)
app.command("simulate", cls=GroupedCommand)(simulate_command)
app.command("report", cls=GroupedCommand)(report_command)
app.command("export", cls=GroupedCommand)(export_command)
app.command("check", cls=GroupedCommand)(check_command)
app.command("bench", cls=GroupedCommand)(bench_command)
app.command("replan", cls=GroupedCommand)(replan_command)
app.command("cluster", cls=GroupedCommand)(cluster_command)
app.command("env", cls=GroupedCommand)(env_command)


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
