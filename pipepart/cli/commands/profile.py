"""``pipepart profile``: what each layer of a model costs."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import options
from ..errors import mistakes_told
from ..measure import HowToMeasure, measure
from ..numbers import parse_counts
from ..output import check_writable, deliver


def profile_command(
    model: options.Model,
    micro_batches: Annotated[
        str,
        typer.Option(
            metavar="N[,N..]",
            help="Parts that a mini-batch will be split into; several measure several sizes.",
        ),
    ] = "1",
    sample: options.Sample = None,
    optimizer: options.Optimizer = None,
    threads: options.Threads = None,
    seconds: options.Seconds = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Measures time and memory of each layer of MODEL.

    MODEL is path/to/file.py:factory or package.module:factory: a function that takes nothing and returns
    (model, sample, target, loss_fn), or the first one, two or three of these. The model is an nn.Sequential.
    """
    with mistakes_told():
        check_writable(output)
        counts = parse_counts("--micro-batches", micro_batches)
        how = HowToMeasure(sample, optimizer, threads, seconds)
        found = measure(model, how, lambda batch: counts)

        def reports():
            from ...reporting import layer_table, size_table

            return [*([size_table(found)] if len(found.costs) > 1 else []), layer_table(found)]

        deliver(found, reports, as_json=as_json, path=output)
