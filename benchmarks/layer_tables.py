"""Profiles from tables of layer times: a published instance, and random ones of its kind."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from pipepart import Profile
from pipepart.capture import LayerInfo
from pipepart.profiling import Costs, LayerCost, Timing

Row = tuple[float, float, float]  # seconds of F, I and W of one micro-batch

# nemotron-nano-v2-9B on one device, in ticks of 0.01 ms: embedding, Mamba, MLP, attention, head and loss.
# OctoPipe, arXiv 2509.23722; simulator: github.com/guojihu-hana/SimPipe.
PUBLISHED: Mapping[str, Row] = {
    "E": (76, 287, 0),
    "M": (268, 430, 176),
    "-": (185, 191, 169),
    "*": (193, 245, 65),
    "L": (1422, 1571, 6),
}
PUBLISHED_LAYERS = "EM-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-L"
PUBLISHED_STEP = 89_870  # of their plan for 4 devices and 8 micro-batches, without communication


def table_profile(rows: Sequence[Row], micro_batches: int, output_bytes: int = 0) -> Profile:
    """Return a profile of layers with the seconds of ``rows``. They have parameters of one byte, and keep nothing."""
    return Profile(
        model="Table",
        batch=micro_batches,
        inputs=(),
        outputs=(),
        layers=tuple(
            LayerInfo(
                name=f"layer{at}", kind="Layer", description="Layer()", parameter_bytes=1, gradient_bytes=1
            )
            for at in range(len(rows))
        ),
        costs=(
            Costs(
                micro_batches=micro_batches,
                samples=1,
                layers=tuple(
                    LayerCost(
                        forward=Timing(seconds=forward),
                        backward_input=Timing(seconds=for_input),
                        backward_weight=Timing(seconds=for_weight),
                        output_bytes=output_bytes,
                    )
                    for forward, for_input, for_weight in rows
                ),
            ),
        ),
        optimizer="sgd",
        device="none",
        threads=1,
        torch_version="none",
    )


def published(micro_batches: int = 8) -> Profile:
    """Return the published instance."""
    return table_profile([PUBLISHED[layer] for layer in PUBLISHED_LAYERS], micro_batches)


def drawn_rows(layers: int, seed: int, head: float = 1.0) -> list[Row]:
    """Return random layers of the published kinds, between its embedding and a head of ``head`` times its length."""
    draw = random.Random(seed)
    forward, for_input, for_weight = PUBLISHED["L"]
    middle = [PUBLISHED[draw.choice("MM--*")] for _ in range(layers)]
    return [PUBLISHED["E"], *middle, (head * forward, head * for_input, for_weight)]
