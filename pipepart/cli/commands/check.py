"""``pipepart check``: whether a pipeline gives the numbers of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from torch import Tensor
from torch.utils import _pytree as pytree

import schedules

from ...capture import capture
from ...data.arguments import Arguments
from ...planning.stage_plan import Recompute
from ...verify import CheckReport, check
from ...verify.compare import SCHEDULES
from .. import options
from ..devices import DeviceOptions
from ..errors import Mistake, mistakes_told
from ..loading import Given, load_model
from ..measure import with_sample
from ..numbers import parse_choice
from ..output import check_writable, deliver, note, quiet_output
from ..sample import make_sample
from ..saved_plan import load_plan

_MODES: tuple[Recompute, ...] = get_args(Recompute)


def check_command(
    model: options.Model,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help=f"Once for each to try: {', '.join(schedules.names())}; {', '.join(SCHEDULES)} if none is given.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="So many accelerators, or virtual devices on the CPU; or torch devices as in cuda:0,cuda:1; "
            "2 if not given.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Parts of a mini-batch; two a device if not given."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Try this plan, with its devices, schedule and micro-batches.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="How many to train.")] = 3,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Once for each to try: own for the model's, float64, float32, bfloat16 or float16; float64 and own "
            "if none is given.",
        ),
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE", show_default=False, help="Once for each to try: never, except-last or always."
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="That trains: sgd or adam.")] = "sgd",
    reduction: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            show_default=False,
            help="How the loss sums up its samples, if it does not say: mean or sum.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the first step.")] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Have virtual devices refuse tensors of each other, as accelerators do."
        ),
    ] = False,
    sample: options.Sample = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Trains MODEL plainly and as pipelines, and compares all numbers.

    Losses, gradients, parameters and buffers after each step, bit for bit. Ends with status 1 where they differ by
    more than rounding, and names the first layer that does.
    """
    with mistakes_told():
        check_writable(output)
        arguments: dict[str, Any] = {
            "steps": steps,
            "optimizer": optimizer,
            "seed": seed,
            "strict": strict,
            "reduction": reduction and parse_choice("--reduction", reduction, ("mean", "sum")),
        }
        if dtype:
            arguments["dtypes"] = dtype
        if plan is not None:
            _refuse_beside_plan(
                schedule=schedule, devices=devices, micro_batches=micro_batches, recompute=recompute
            )
            arguments["plan"] = load_plan(plan)
        else:
            arguments["devices"] = DeviceOptions(devices or "2").make_cluster()
            arguments["micro_batches"] = micro_batches
            arguments["schedules"] = [
                parse_choice("--schedule", name, schedules.names()) for name in schedule or SCHEDULES
            ]
            arguments["recompute"] = [
                parse_choice("--recompute", mode, _MODES) for mode in recompute or ("never",)
            ]
        found = _check(model, sample, arguments)

        def reports():
            from ...reporting import check_table

            return [check_table(found)]

        deliver(found, reports, as_json=as_json, path=output)
    if not found.ok:
        raise typer.Exit(1)


def _check(name: str, sample: str | None, arguments: dict[str, Any]) -> CheckReport:
    with quiet_output():
        given = with_sample(name, load_model(name), None if sample is None else make_sample(sample))
        return check(given.model, given.sample, target=given.target, loss_fn=_loss(given), **arguments)


def _loss(given: Given) -> Callable[..., Tensor] | None:
    """The loss, or one for a model that has none; None for a model that computes its own."""
    if given.loss_fn is not None:
        return given.loss_fn
    sample = Arguments.of(given.sample)
    outputs = capture(given.model, *sample.args, **sample.kwargs).layers[-1].outputs
    if len(outputs) == 1 and not outputs[0].shape:
        return None
    note("no loss function: the mean of the squares of the output is taken")
    return _mean_square


def _mean_square(output: Any, target: Any = None) -> Tensor:
    """Over all numbers of the output; a target is not looked at."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return sum((tensor.square().mean() for tensor in tensors[1:]), tensors[0].square().mean())


def _refuse_beside_plan(**given: Any) -> None:
    if named := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise Mistake(f"{', '.join(named)}: the plan says that, leave it out or leave --plan out")
