"""``pipepart check``: compare pipelines with the plain model, number by number."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import options
from ..errors import UsageError
from ..options import option


def check_command(
    context: typer.Context,
    model: options.Model,
    plan: options.PlanOption = None,
    devices: options.Devices = None,
    cluster: options.Cluster = None,
    schedules: Annotated[
        list[str] | None,
        option(
            "NAME",
            f"A schedule to try; repeatable. Of {options.SCHEDULE_LIST}; gpipe, 1f1b and zb-h1 if none is given.",
            "--schedule",
        ),
    ] = None,
    recompute: Annotated[
        list[str] | None,
        option(
            "MODE",
            "Activation checkpointing to try; repeatable. Of never (the default), except-last, always.",
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A precision to try; repeatable. Of own (the model's), float64, float32, bfloat16 and float16; float64 "
            "and own if none is given.",
            "--dtype",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, option("N", "Parts of a mini-batch; two per device if not given.", min=1)
    ] = None,
    steps: Annotated[int, option("N", "Number of training steps.", min=1, show_default=True)] = 3,
    tolerance: Annotated[
        float | None,
        option(
            "ERROR",
            "Largest relative error that counts as rounding, as 1e-6. If not given, 1e-9 in float64, 1e-4 in "
            "float32, 5e-2 in bfloat16 and float16.",
            min=0,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Forbid mixing tensors of different virtual devices, as accelerators do."
        ),
    ] = False,
    reduction: options.Reduction = None,
    layers: options.Layers = None,
    sample: options.Sample = None,
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
    from ..devices import make_cluster
    from ..files import read
    from ..model import load
    from ..output import check_writable, deliver, user_output_to_stderr

    check_writable(output)
    fixed = options.set_by_user(
        context, "schedules", "devices", "cluster", "micro_batches", "recompute", "layers"
    )
    if plan is not None and fixed:
        raise UsageError(f"{', '.join(fixed)}: the plan says that, leave it out or leave --plan out")
    lists: dict[str, Any] = {"schedules": schedules, "recompute": recompute, "dtypes": dtypes}
    chosen, where = read(Plan, plan) if plan else None, None
    if devices or cluster:
        where = make_cluster(devices, cluster)
    elif chosen is None and not under_torchrun():
        where = make_cluster("2")
    loaded = load(model, sample)
    with user_output_to_stderr():
        outcome = check(
            loaded.model,
            loaded.sample,
            target=loaded.target,
            loss_fn=loaded.loss_fn,
            plan=chosen,
            devices=where,
            layers=layers,
            micro_batches=micro_batches,
            steps=steps,
            reduction=reduction,
            strict=strict,
            tolerance=tolerance,
            **{name: value for name, value in lists.items() if value},
        )
    if not under_torchrun() or torch.distributed.get_rank() == 0:
        deliver(outcome, lambda: [check_table(outcome)], as_json=as_json, path=output)
    if not outcome.ok:
        raise typer.Exit(1)
