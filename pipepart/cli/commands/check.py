"""``pipepart check``: compare pipelines with the plain model, number by number."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from ...cluster import Cluster


@with_exit_status
def check_command(
    context: typer.Context,
    model: options.Model,
    schedule: Annotated[
        list[str] | None,
        option(
            "NAME",
            f"A schedule to try; repeatable. Of {options.SCHEDULE_LIST}; gpipe, 1f1b and zb-h1 if none is "
            "given.",
            group="Pipeline",
            words=options.SCHEDULES,
        ),
    ] = None,
    devices: options.Devices = None,
    micro_batches: Annotated[
        int | None,
        option("N", "Parts of a mini-batch; two per device if not given.", min=1, group="Pipeline"),
    ] = None,
    plan: Annotated[
        Path | None,
        option("FILE", "Try this saved plan with its devices, schedule and micro-batches.", group="Pipeline"),
    ] = None,
    cluster: Annotated[
        Path | None,
        option(
            "FILE",
            "The devices, as `pipepart cluster -o` saves them; in place of --devices.",
            group="Devices",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        option(
            "ERROR",
            "Largest relative error that counts as rounding, as 1e-6. If not given, 1e-9 in float64, 1e-4 in "
            "float32, 5e-2 in bfloat16 and float16.",
            min=0,
            group="Training",
        ),
    ] = None,
    steps: Annotated[
        int, option("N", "Number of training steps.", min=1, show_default=True, group="Training")
    ] = 3,
    dtype: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A precision to try; repeatable. own (the model's), float64, float32, bfloat16 or float16; float64 and "
            "own if none is given.",
            group="Training",
            words=("own", *options.FLOATS),
        ),
    ] = None,
    recompute: Annotated[
        list[str] | None,
        option(
            "MODE",
            "Activation checkpointing to try; repeatable. never, except-last or always.",
            group="Pipeline",
            words=options.RECOMPUTE,
        ),
    ] = None,
    optimizer: Annotated[
        str,
        option(
            "NAME",
            "The optimizer: sgd or adam.",
            show_default=True,
            group="Training",
            words=("sgd", "adam"),
        ),
    ] = "sgd",
    reduction: Annotated[
        str | None,
        option(
            "HOW",
            "How the loss reduces over samples, if it does not say: mean, sum, or batch for any loss of the whole "
            "mini-batch.",
            group="Training",
            words=options.REDUCTIONS,
        ),
    ] = None,
    seed: Annotated[
        int, option("N", "Random seed of the first step.", min=0, show_default=True, group="Training")
    ] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Forbid mixing tensors of different virtual devices, as accelerators do.",
            rich_help_panel="Pipeline",
        ),
    ] = False,
    sample: options.Sample = None,
    layers: options.Layers = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Train MODEL plainly and as pipelines; compare all numbers.

    Losses, gradients, parameters and buffers after each step are compared bit for bit. The status is 1 if they differ
    by more than rounding; the first layer that differs is named.
    """
    import torch.distributed

    from ...planning import Plan
    from ...ranks import under_torchrun
    from ...reporting import check_table
    from ...verify import check
    from ..default_loss import loss_or_mean_square
    from ..files import read
    from ..model import load
    from ..output import check_writable, deliver, user_output_to_stderr

    check_writable(output)
    fixed = options.given(context, "schedule", "devices", "cluster", "micro_batches", "recompute", "layers")
    if plan is not None and fixed:
        raise UsageError(f"{', '.join(fixed)}: the plan says that, leave it out or leave --plan out")
    chosen: dict[str, Any] = {
        "plan": read(Plan, plan) if plan else None,
        "layers": layers,
        "devices": _devices(devices, cluster) if not plan else None,
        "schedules": schedule,
        "recompute": recompute,
        "dtypes": dtype,
    }
    if tolerance is not None:
        chosen["tolerance"] = tolerance
    with user_output_to_stderr():
        given = load(model, sample)
        found = check(
            given.model,
            given.sample,
            target=given.target,
            loss_fn=loss_or_mean_square(given, layers),
            micro_batches=micro_batches,
            steps=steps,
            optimizer=optimizer,  # type: ignore[arg-type]  # check refuses other names
            reduction=reduction,  # type: ignore[arg-type]
            seed=seed,
            strict=strict,
            **{name: value for name, value in chosen.items() if value is not None},
        )
    if not under_torchrun() or torch.distributed.get_rank() == 0:
        deliver(found.model_dump_json(indent=1), lambda: [check_table(found)], as_json=as_json, path=output)
    if not found.ok:
        raise typer.Exit(1)


def _devices(devices: str | None, cluster: Path | None) -> Cluster | None:
    """Return the devices to check on; None under torchrun for those of its processes."""
    from ...ranks import under_torchrun
    from ..devices import make_cluster

    if devices is None and cluster is None:
        return None if under_torchrun() else make_cluster("2")
    return make_cluster(devices, cluster)
