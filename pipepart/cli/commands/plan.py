"""``pipepart plan``: the best cut and schedule of a model for given devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from ...cluster import Cluster
from ...planning import micro_batches_worth_trying, plan
from ...planning.costs.stage_memory import RecomputeChoice
from ...planning.search.candidate import ASYNCHRONOUS, CHUNKS
from ...planning.search.strategies import AUTO
from ...profiling import Profile
from .. import constraint_options, options
from ..devices import DeviceOptions
from ..errors import Mistake, mistakes_told
from ..measure import HowToMeasure, measure
from ..numbers import parse_choice, parse_count
from ..output import check_writable, deliver
from ..reports import plan_reports

_MODES: tuple[RecomputeChoice, ...] = get_args(RecomputeChoice)


def plan_command(
    model_or_profile: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_PROFILE",
            show_default=False,
            help="As path/to/file.py:factory, or a profile that was saved, as in profile.json.",
        ),
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="So many accelerators, or virtual devices on the CPU; or torch devices as in cuda:0,cuda:1.",
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="A cluster that was saved as JSON."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEMORY[@SPEED]",
            show_default=False,
            help="A device that is not at hand, once for each: 24GiB, or 16GiB@0.6 if slower than the one profiled.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", show_default=False, help="Bandwidth between described devices: 12GB/s."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", show_default=False, help="What each device may use: 2GiB.")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(CHUNKS)}; auto for the best of {', '.join(AUTO)}; search for an order made for the "
            f"stages; or {', '.join(ASYNCHRONOUS)}, which do not train to the numbers of plain training.",
        ),
    ] = "auto",
    micro_batches: Annotated[
        str, typer.Option(metavar="N", help="Parts of a mini-batch, or auto for the best that is profiled.")
    ] = "auto",
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="How many, or auto for the best number; one a device if not given.",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Stages of each device, for a schedule that has several; 2 if not given.",
        ),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Copies of the model, each on devices of its own with a part of the micro-batches; or auto for the "
            "best of the numbers that divide the devices.",
        ),
    ] = "1",
    max_micro_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="With auto, no more micro-batches than these."
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="Forwards that are run again to save memory: auto in stages that do not fit else; or in all stages "
            "never, except-last (all micro-batches but the last) or always.",
        ),
    ] = "auto",
    pin: constraint_options.Pin = None,
    together: constraint_options.Together = None,
    no_cut_before: constraint_options.NoCutBefore = None,
    cut_before: constraint_options.CutBefore = None,
    part_shared: Annotated[
        bool,
        typer.Option(
            "--part-shared",
            help="Lets layers that share a parameter be in different stages, where no cut keeps them together.",
        ),
    ] = False,
    sample: options.Sample = None,
    optimizer: options.Optimizer = None,
    threads: options.Threads = None,
    seconds: options.Seconds = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Cuts a model into stages, and predicts step and memory.

    MODEL_OR_PROFILE is a profile that was saved (a path that ends in .json), or a model as `pipepart profile`
    takes it, which is measured first.
    """
    with mistakes_told():
        check_writable(output)
        count = parse_count("--micro-batches", micro_batches)
        number = None if stages is None else parse_count("--stages", stages)
        copies = parse_count("--replicas", replicas)
        parse_choice("--schedule", schedule, (*CHUNKS, *ASYNCHRONOUS, "auto", "search"))
        mode = parse_choice("--recompute", recompute, _MODES)
        asked = constraint_options.WishOptions(pin, together, no_cut_before, cut_before).arguments()
        where = DeviceOptions(devices, cluster, tuple(device or ()), link, memory).make_cluster()
        how = HowToMeasure(sample, optimizer, threads, seconds)
        profile = _profile(model_or_profile, how, where, count, max_micro_batches)
        made = plan(
            profile,
            where,
            schedule=schedule,
            micro_batches=count,
            recompute=mode,
            stages=number,
            chunks=chunks,
            replicas=copies,
            part_shared=part_shared,
            max_micro_batches=max_micro_batches,
            **asked,
        )
        deliver(made, lambda: plan_reports(made, compact=True), as_json=as_json, path=output)


def _profile(
    name: str, how: HowToMeasure, cluster: Cluster, count: int | Literal["auto"], most: int | None
) -> Profile:
    if name.endswith(".json"):
        return _load(Path(name), how)
    threads = how.threads or cluster.devices[0].threads

    def sizes(batch: int) -> list[int]:
        if count != "auto":
            return [count]
        worth = micro_batches_worth_trying(batch, len(cluster))
        return sorted({min(each, most) for each in worth}) if most else worth

    return measure(name, HowToMeasure(how.sample, how.optimizer, threads, how.seconds), sizes)


def _load(path: Path, how: HowToMeasure) -> Profile:
    if how.given():
        raise Mistake(f"{', '.join(how.given())} cannot change {path}, which is measured already")
    try:
        return Profile.load(path)
    except OSError as error:
        raise Mistake(f"cannot read the profile {str(path)!r}: {error.strerror or error}") from None
