"""``pipepart plan``: find the best cut and schedule of a model for given devices."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import options
from ..errors import UsageError
from ..options import option

if TYPE_CHECKING:
    from ...profiling import Profile

_PROFILING = ("sample", "layers", "optimizer", "threads", "time_budget", "roofline")


def plan_command(
    context: typer.Context,
    model_or_profile: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_PROFILE",
            show_default=False,
            help="path/to/file.py:factory, or a saved profile as in profile.json.",
        ),
    ],
    devices: options.Devices = None,
    cluster: options.Cluster = None,
    described: options.Described = None,
    bandwidth: options.Bandwidth = None,
    more_devices: Annotated[
        int | None, option("N", "Add N devices like the largest of these.", min=1, group="Devices")
    ] = None,
    memory: Annotated[
        str | None, option("SIZE", "Memory limit of each device: 2GiB; in place of the one it has.")
    ] = None,
    schedule: options.Schedule = "auto",
    micro_batches: options.MicroBatches = "auto",
    stages: Annotated[
        Any,
        option(
            "N",
            "Number of stages, or auto for the best. Devices that gain nothing are left out.",
            parser=options.count_or_auto,
            show_default=True,
        ),
    ] = "auto",
    recompute: options.Recompute = "auto",
    chunks: Annotated[
        int | None,
        option(
            "N",
            "Stages per device, for a schedule that has several; 2 if not given, any number under auto.",
            min=1,
            group="Schedule",
        ),
    ] = None,
    replicas: Annotated[
        Any,
        option(
            "N",
            "Replicas of the model, each on devices of its own with a share of the micro-batches; or auto.",
            parser=options.count_or_auto,
            show_default=True,
            group="Schedule",
        ),
    ] = "1",
    tensor: Annotated[
        int,
        option(
            "N",
            "Consecutive devices that share the layers of each stage (tensor parallelism), planned as one device.",
            min=1,
            show_default=True,
            group="Schedule",
        ),
    ] = 1,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard",
            help="Shard the parameters of each stage over its replicas (fully_shard).",
            rich_help_panel="Schedule",
        ),
    ] = False,
    offload: Annotated[
        Literal["auto", "never", "stash"],
        option(
            "MODE",
            "Keep what a stage saves for its backward on the host: auto for stages that would not fit, if the cluster "
            "says how fast its devices reach their host; stash for all stages; or never.",
            show_default=True,
            group="Schedule",
        ),
    ] = "auto",
    reduction: options.Reduction = None,
    compress: Annotated[
        list[str] | None,
        option(
            "TYPE|TIER=TYPE",
            "Send activations and gradients as bf16 or int8 between hosts, or between devices if there is one host; "
            "network=int8 or link=bf16 name the links between hosts or within one; repeatable. Training is then not "
            "exact.",
            group="Devices",
        ),
    ] = None,
    seconds: options.SearchSeconds = None,
    colocate: Annotated[
        list[Any] | None,
        option(
            "LAYER,LAYER[,..]",
            "Layers that must share a stage; repeatable.",
            parser=options.names,
            group="Cut",
        ),
    ] = None,
    cut_before: Annotated[
        list[str] | None,
        option(
            "LAYER",
            "First layer of a stage; repeatable. Given for every stage but the first, this is the whole cut.",
            group="Cut",
        ),
    ] = None,
    allow_split_ties: Annotated[
        bool,
        typer.Option(
            "--allow-split-ties",
            help="Allow layers that share a parameter in different stages if no cut keeps them together.",
            rich_help_panel="Cut",
        ),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Estimate the costs of --micro-batches from the numbers in the profile, if it has not that one.",
            rich_help_panel="Profiling",
        ),
    ] = False,
    sample: options.Sample = None,
    layers: options.Layers = None,
    optimizer: options.Optimizer = "adam",
    threads: options.Threads = None,
    time_budget: options.TimeBudget = 1.0,
    roofline: options.Roofline = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Cut a model into stages; predict step time and memory.

    MODEL_OR_PROFILE is a saved profile (a path that ends in .json), or a model as `pipepart profile` takes it, which
    is profiled first.
    """
    from ...planning import PlanOptions, micro_batches_worth_trying, plan
    from ...reporting import plan_reports
    from ..devices import make_cluster
    from ..model import load, measure
    from ..output import check_writable, deliver

    check_writable(output)
    if estimate and micro_batches == "auto":
        raise UsageError("--estimate goes with --micro-batches N, the number to estimate for")
    where = make_cluster(devices, cluster, described or (), bandwidth)
    where = where.with_more(more_devices) if more_devices else where
    where = where.with_memory(memory) if memory else where

    def sizes(batch: int) -> list[int]:
        if micro_batches != "auto":
            return [micro_batches]
        return micro_batches_worth_trying(batch, len(where))

    if model_or_profile.endswith(".json"):
        if ignored := options.set_by_user(context, *_PROFILING):
            raise UsageError(
                f"{', '.join(ignored)} cannot change {model_or_profile}, which is measured already"
            )
        profile = _saved(Path(model_or_profile), micro_batches, estimate)
    else:
        profile = measure(
            load(model_or_profile, sample),
            sizes,
            roofline,
            layers=layers,
            optimizer=optimizer,
            threads=threads or where.devices[0].threads,
            seconds=time_budget,
            devices=len(where),
        )
    keywords = {field.name: context.params[field.name] for field in fields(PlanOptions)}
    keywords["compress"] = _compressed(compress or [])
    asked = {name: value for name, value in keywords.items() if value not in (None, (), [])}
    planned = plan(profile, where, **asked)
    deliver(planned, lambda: plan_reports(planned, compact=True), as_json=as_json, path=output)


def _compressed(texts: list[str]) -> str | dict[str, str] | None:
    """Return the keyword of ``pipepart.plan`` for ``--compress``.

    >>> _compressed(["bf16"]), _compressed(["link=bf16", "network=int8"])
    ('bf16', {'link': 'bf16', 'network': 'int8'})
    """
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    tiers = dict(text.split("=", 1) for text in texts if "=" in text)
    if len(tiers) < len(texts):
        raise UsageError(
            "give --compress once with a type alone, or once for each of link=TYPE and network=TYPE"
        )
    return tiers or None


def _saved(path: Path, micro_batches: int | Literal["auto"], estimated: bool) -> Profile:
    """Read a profile, and check that it has the costs at a number of micro-batches, or estimate them."""
    from ...planning import estimate
    from ...profiling import Profile
    from ..files import read

    profile = read(Profile, path)
    counts = [costs.micro_batches for costs in profile.costs]
    if micro_batches == "auto" or micro_batches in counts:
        return profile
    if estimated:
        return estimate(profile, micro_batches)
    raise UsageError(
        f"{path} was profiled with {', '.join(map(str, counts))} micro-batches, not with {micro_batches}: "
        f"add --estimate, or profile again with --micro-batches {micro_batches}"
    )
