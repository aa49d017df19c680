"""What a user asks of a cut, as options of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

import typer

from .errors import Mistake

Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER=STAGE",
        show_default=False,
        help="The stage that a layer has to be in, once for each; stages count from 0.",
    ),
]
Together = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER,LAYER[,..]",
        show_default=False,
        help="Layers that stay in one stage, once for each group.",
    ),
]
NoCutBefore = Annotated[
    list[str] | None,
    typer.Option(metavar="LAYER", show_default=False, help="A layer that no stage begins with."),
]
CutBefore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER",
        show_default=False,
        help="A layer that a stage begins with; given once for each stage but the first, this is the whole cut.",
    ),
]


class WishArguments(TypedDict):
    """The arguments of :func:`pipepart.plan` that say what is asked of the cut."""

    pin: dict[str, int] | None
    together: list[list[str]]
    no_cut_before: list[str]
    cut_before: list[str] | None


@dataclass(frozen=True)
class WishOptions:
    """The options as they were given."""

    pin: Sequence[str] | None = None
    together: Sequence[str] | None = None
    no_cut_before: Sequence[str] | None = None
    cut_before: Sequence[str] | None = None

    def arguments(self) -> WishArguments:
        """What to pass on.

        Raises:
            Mistake: a pin without a stage, one layer with two pins, or a group of less than two layers.
        """
        return {
            "pin": self._pins(),
            "together": [_group(text) for text in self.together or ()],
            "no_cut_before": list(self.no_cut_before or ()),
            "cut_before": list(self.cut_before) if self.cut_before else None,
        }

    def _pins(self) -> dict[str, int] | None:
        pins: dict[str, int] = {}
        for text in self.pin or ():
            layer, equals, stage = text.rpartition("=")
            if not equals or not layer or not stage.isdecimal():
                raise Mistake(f"--pin {text!r}: give a layer and its stage, as in --pin encoder.0=1")
            if pins.setdefault(layer, int(stage)) != int(stage):
                raise Mistake(f"--pin has layer {layer!r} in stage {pins[layer]} and in stage {stage}")
        return pins or None


def _group(text: str) -> list[str]:
    layers = [layer.strip() for layer in text.split(",")]
    if len(layers) < 2 or not all(layers):
        raise Mistake(f"--together {text!r}: give layers with commas between them, as in --together 3,4")
    return layers
