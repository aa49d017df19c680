"""The colours of actions, by kind and chunk."""

from __future__ import annotations

from typing import NamedTuple

from ..core.action import Kind

TEXT = "#1f2328"
FAINT = "#8c929a"
IDLE = "#f1f2f4"
BACKGROUND = "#ffffff"


class Look(NamedTuple):
    """Appearance of the boxes of one kind of action.

    Args:
        word: in the legend.
        light: fill of a device's first, third, ... stage; dark text is read on it.
        dark: fill of its second, fourth, ... stage; white text is read on it.
    """

    word: str
    light: str
    dark: str


# The hues are those of Okabe and Ito (2008), which people with any colour blindness tell apart. Light fills also differ
# in lightness, so that a print in grey shows them, and dark fills are below L* 50.
LOOKS = {
    Kind.F: Look("forward", "#a9d6f5", "#0b5c92"),
    Kind.B: Look("backward", "#f2a93b", "#a84b00"),
    Kind.I: Look("backward for inputs", "#45a987", "#004a33"),
    Kind.W: Look("backward for weights", "#f6ec9a", "#867300"),
    Kind.RECOMPUTE: Look("recompute", "#c07fa8", "#8a3a6b"),
    Kind.OFFLOAD: Look("copy to the host", "#c9ccd1", "#5b616a"),
    Kind.RELOAD: Look("copy back", "#b3b8bf", "#474d55"),
    Kind.REDUCE_GRAD: Look("sum of gradients", "#e0846a", "#8f2d13"),
    Kind.OPT_STEP: Look("optimizer step", "#9aa0a8", "#33383e"),
}


def fill_of(kind: Kind, chunk: int) -> tuple[str, str]:
    """Return the colours of a box and of its text."""
    look = LOOKS[kind]
    return (look.dark, "#ffffff") if chunk % 2 else (look.light, TEXT)
