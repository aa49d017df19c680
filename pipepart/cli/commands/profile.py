"""``pipepart profile``: print what each layer of a model costs."""

from __future__ import annotations

from typing import Annotated, Any

from .. import options
from ..options import option


def profile_command(
    model: options.Model,
    micro_batches: Annotated[
        Any,
        option(
            "N[,N..]",
            "Number of parts that a mini-batch is split into; several numbers measure several sizes.",
            parser=options.counts,
            show_default=True,
        ),
    ] = "1",
    sample: options.Sample = None,
    layers: options.Layers = None,
    optimizer: options.Optimizer = "adam",
    device: Annotated[
        str | None,
        option(
            "NAME",
            "Measure on this torch device, as cuda:0, one layer at a time if the model is elsewhere.",
            group="Profiling",
        ),
    ] = None,
    threads: options.Threads = None,
    time_budget: options.TimeBudget = 1.0,
    roofline: options.Roofline = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Measure time and memory of each layer of MODEL, or estimate the time.

    MODEL names a function that returns (model, sample, target, loss_fn), or the first one, two or three of these; its
    arguments may follow in parentheses. The layers of an nn.Sequential are its modules, those of any other model its
    blocks.
    """
    from ...reporting import layer_table, size_table
    from ..devices import torch_device
    from ..model import load, measure
    from ..output import check_writable, deliver

    check_writable(output)
    profile = measure(
        load(model, sample),
        lambda _: micro_batches,
        roofline,
        layers=layers,
        optimizer=optimizer,
        device=torch_device("--device", device) if device else None,
        threads=threads,
        seconds=time_budget,
    )
    sizes = [size_table(profile)] if len(profile.costs) > 1 else []
    deliver(profile, lambda: [*sizes, layer_table(profile, folded=True)], as_json=as_json, path=output)
