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

_EXAMPLES = {
    "pipepart": (
        "plan train.py:model --devices 2 -o plan.json",
        "explain plan.json",
        "check train.py:model --plan plan.json",
        "bench train.py:model --plan plan.json --trace trace.json",
        "report plan.json --trace trace.json",
    ),
    "profile": (
        "profile train.py:model --micro-batches 4,8 -o profile.json",
        "profile 'train.py:model(width=64)' --input 32x3x16x16",
    ),
    "plan": (
        "plan train.py:model --devices 2 -o plan.json",
        "plan profile.json --device 24GiB --device 16GiB@0.6 --bandwidth 12GB/s",
    ),
    "explain": ("explain plan.json --trace trace.json", "explain before.json after.json"),
    "simulate": (
        "simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1",
        "simulate --schedule 1f1b --schedule zb-v --devices 4 --micro-batches 8",
        "simulate plan.json --schedule zb-h1 -o step.svg",
    ),
    "report": ("report plan.json --trace trace.json -o report.html", "report before.json after.json"),
    "export": ("export plan.json --to torchtitan -o exported",),
    "check": ("check train.py:model", "check train.py:model --plan plan.json"),
    "bench": ("bench train.py:model --devices 2", "bench train.py:model --plan plan.json --trace trace.json"),
    "env": ("env > environment.txt",),
    "replan": ("replan plan.json --trace trace.json -o next.json",),
    "cluster": (
        "cluster -o cluster.json",
        "cluster --device 24GiB --hosts 2 --devices-per-host 4 --network 25GB/s",
    ),
}


def _examples(name: str) -> str:
    """Return the example lines of a command as the last part of its ``--help``."""
    return "Examples:\n\n" + "\n\n".join(f"`pipepart {line}`" for line in _EXAMPLES[name])


app = typer.Typer(
    name="pipepart",
    no_args_is_help=True,
    epilog=_examples("pipepart"),
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("profile", epilog=_examples("profile"))(profile_command)
app.command("plan", epilog=_examples("plan"))(plan_command)
app.command("explain", epilog=_examples("explain"))(explain_command)
app.command("simulate", epilog=_examples("simulate"))(simulate_command)
app.command("report", epilog=_examples("report"))(report_command)
app.command("export", epilog=_examples("export"))(export_command)
app.command("check", epilog=_examples("check"))(check_command)
app.command("bench", epilog=_examples("bench"))(bench_command)
app.command("replan", epilog=_examples("replan"))(replan_command)
app.command("cluster", epilog=_examples("cluster"))(cluster_command)
app.command("env", epilog=_examples("env"))(env_command)


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
