"""``pipepart check``: compare pipelines with the plain model, number by number."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options, parsers
from ..errors import UsageError, user_errors

if TYPE_CHECKING:
    from ...verify import CheckReport


def check_command(
    context: typer.Context,
    model: options.Model,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            parser=parsers.choice(*parsers.SCHEDULES),
            metavar="NAME",
            show_default=False,
            help=f"A schedule to try; repeatable. Of {', '.join(parsers.SCHEDULES)}; gpipe, 1f1b and zb-h1 if none "
            "is given.",
        ),
    ] = None,
    devices: options.Devices = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Parts of a mini-batch; two per device if not given."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Try this saved plan with its devices, schedule and micro-batches.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Number of training steps.")] = 3,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="A precision to try; repeatable. own (the model's), float64, float32, bfloat16 or float16; float64 "
            "and own if none is given.",
        ),
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            parser=parsers.choice(*parsers.RECOMPUTE),
            metavar="MODE",
            show_default=False,
            help="Activation checkpointing to try; repeatable. never, except-last or always.",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="The optimizer: sgd or adam.")] = "sgd",
    reduction: Annotated[
        str | None,
        typer.Option(
            parser=parsers.choice("mean", "sum", "batch"),
            metavar="HOW",
            show_default=False,
            help="How the loss reduces over samples, if it does not say: mean or sum.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the first step.")] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Forbid mixing tensors of different virtual devices, as accelerators do."
        ),
    ] = False,
    sample: options.Sample = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Train MODEL plainly and as pipelines; compare all numbers.

    Losses, gradients, parameters and buffers after each step are compared bit for bit. The status is 1 if they differ
    by more than rounding; the first layer that differs is named.
    """
    with user_errors():
        from ...planning import Plan
        from ...reporting import check_table
        from ...verify.compare import SCHEDULES
        from ..devices import make_cluster
        from ..files import check_writable, read
        from ..output import deliver

        check_writable(output)
        arguments: dict[str, Any] = {
            "steps": steps,
            "optimizer": optimizer,
            "seed": seed,
            "strict": strict,
            "reduction": reduction,
        }
        if dtype:
            arguments["dtypes"] = dtype
        if plan is not None:
            if ignored := options.given(context, "schedule", "devices", "micro_batches", "recompute"):
                raise UsageError(
                    f"{', '.join(ignored)}: the plan says that, leave it out or leave --plan out"
                )
            arguments["plan"] = read(Plan, plan)
        else:
            arguments["devices"] = make_cluster(devices or "2")
            arguments["micro_batches"] = micro_batches
            arguments["schedules"] = schedule or SCHEDULES
            arguments["recompute"] = recompute or ("never",)
        found = _check(model, sample, arguments)
        deliver(found, lambda: [check_table(found)], as_json=as_json, path=output)
    if not found.ok:
        raise typer.Exit(1)


def _check(name: str, sample: str | None, arguments: dict[str, Any]) -> CheckReport:
    from ...verify import check
    from ..measure import load_with_sample, loss_or_mean_square
    from ..output import user_output_to_stderr

    with user_output_to_stderr():
        given = load_with_sample(name, sample)
        return check(
            given.model, given.sample, target=given.target, loss_fn=loss_or_mean_square(given), **arguments
        )
