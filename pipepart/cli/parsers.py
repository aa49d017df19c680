"""Parsers of option values. They import no heavy modules, so a wrong value is reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Literal

import typer

# Equal to schedules.names(), which would import numpy; a test compares the two.
SCHEDULES = (
    "1f1b",
    "chimera",
    "dualpipe-v",
    "eager-1f1b",
    "gpipe",
    "hanayo",
    "interleaved-1f1b",
    "interleaved-zb",
    "looped-bfs",
    "pipedream",
    "pipedream-2bw",
    "sequential",
    "v-half",
    "v-min",
    "zb-h1",
    "zb-h2",
    "zb-v",
)
RECOMPUTE = ("never", "except-last", "always")


def counts(text: str) -> list[int]:
    """One number of at least 1, or several with commas between them.

    >>> counts("2,4")
    [2, 4]
    """
    return [_count(part, text, "a number of at least 1, or several as in 2,4,8") for part in text.split(",")]


def count_or_auto(text: str) -> int | Literal["auto"]:
    """A number of at least 1, or ``"auto"``."""
    return "auto" if text == "auto" else _count(text, text, "a number of at least 1, or auto")


def costs(text: str) -> list[float]:
    """One number for all stages, or one per stage with commas between them."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give one number for all stages, or one per stage as in 1,2,1"
        ) from None
    if not all(0 <= number < float("inf") for number in numbers):
        raise typer.BadParameter(f"{text!r}: costs are finite and not negative")
    return numbers


def choice(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts one of the given words."""

    def parse(text: str) -> str:
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(choices)}"
        raise typer.BadParameter(f"{text!r}: {hint}")

    return parse


def pin(text: str) -> tuple[str, int]:
    """A layer and its stage, as in ``encoder.0=1``."""
    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal():
        raise typer.BadParameter(f"{text!r}: give a layer and its stage, as in --pin encoder.0=1")
    return layer, int(stage)


def layer_group(text: str) -> list[str]:
    """At least two layers with commas between them."""
    layers = [layer.strip() for layer in text.split(",")]
    if len(layers) < 2 or not all(layers):
        raise typer.BadParameter(f"{text!r}: give layers with commas between them, as in --colocate 3,4")
    return layers


def pins(given: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The stage of each pinned layer.

    Raises:
        typer.BadParameter: a layer has two stages.
    """
    found: dict[str, int] = {}
    for layer, stage in given:
        if found.setdefault(layer, stage) != stage:
            raise typer.BadParameter(
                f"layer {layer!r} is pinned to stage {found[layer]} and to stage {stage}"
            )
    return found


def _count(part: str, whole: str, wanted: str) -> int:
    if not part.strip().isdecimal() or int(part) < 1:
        raise typer.BadParameter(f"{whole!r}: give {wanted}")
    return int(part)
