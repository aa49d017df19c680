"""Command-line options shared by several commands, and parsers of option values.

It imports nothing heavy, so that a wrong value is reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..input_error import InputError
from ..units import parse_bandwidth, parse_bytes
from ..whole_file import is_stream

# Equal to schedules.names(), which would import numpy; a test compares the two.
SCHEDULE_LIST = (
    "1f1b, chimera, dualpipe-v, eager-1f1b, gpipe, hanayo, interleaved-1f1b, interleaved-zb, looped-bfs, pipedream, "
    "pipedream-2bw, sequential, v-half, v-min, zb-h1, zb-h2, zb-v"
)
SCHEDULES = SCHEDULE_LIST.split(", ")
REQUESTED_SCHEDULES = (*SCHEDULES, "auto", "search")
# Equal to the engines of plan.export; a test compares the two.
ENGINES = ("torch-pipelining", "torchtitan", "megatron", "deepspeed")
_MOST_SECONDS = 1e6  # of one action
FLOATS = ("float32", "float64", "float16", "bfloat16")
RECOMPUTE = ("never", "except-last", "always")
REDUCTIONS = ("mean", "sum", "batch")


def counts(text: str) -> list[int]:
    """Parse one number of at least 1, or several with commas between them.

    >>> counts("2,4")
    [2, 4]
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}: give a number of at least 1, or several as in 2,4,8")
    return [int(part) for part in parts]


def count_or_auto(text: str) -> int | Literal["auto"]:
    """Parse a number of at least 1, or ``"auto"``."""
    if text == "auto":
        return "auto"
    if not text.strip().isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r}: give a number of at least 1, or auto")
    return int(text)


def costs(text: str) -> list[float]:
    """Parse one number for all stages, or one per stage with commas between them."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give one number for all stages, or one per stage as in 1,2,1"
        ) from None
    if not all(0 <= number <= _MOST_SECONDS for number in numbers):
        raise typer.BadParameter(f"{text!r}: costs are seconds from 0 to {_MOST_SECONDS:g}")
    return numbers


def size(text: str) -> str:
    """Check that a text is one size, or several with commas between them, and return it."""
    return _checked(text, text.split(","), parse_bytes)


def rate(text: str) -> str:
    """Check that a text is a bandwidth, and return it."""
    return _checked(text, [text], parse_bandwidth)


def described(text: str) -> str:
    """Check the memory of a described device, ``MEMORY[@SPEED]``, and return the text."""
    return _checked(text, [text.partition("@")[0]], parse_bytes)


def _checked(text: str, parts: Sequence[str], parse: Callable[[str], object]) -> str:
    try:
        for part in parts:
            parse(part)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" and not is_stream(path):
        raise typer.BadParameter(
            f"cannot save JSON in {text!r}: its name must end in .json, by which commands know it"
        )
    return path


def choice(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts one of the given words, in capitals too."""

    def parse(text: str) -> str:
        if text.lower() in choices:
            return text.lower()
        near = difflib.get_close_matches(text.lower(), choices)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(choices)}"
        raise typer.BadParameter(f"{text!r}: {hint}")

    return parse


def _pin(text: str) -> tuple[str, int]:
    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal():
        raise typer.BadParameter(f"{text!r}: give a layer and its stage, as in --pin encoder.0=1")
    return layer, int(stage)


def _compress(text: str) -> tuple[str, str]:
    tier, equals, dtype = text.rpartition("=")
    return choice("link", "network")(tier) if equals else "", choice("bf16", "int8")(dtype)


def _layer_group(text: str) -> list[str]:
    layers = [layer.strip() for layer in text.split(",")]
    if len(layers) < 2 or not all(layers):
        raise typer.BadParameter(f"{text!r}: give layers with commas between them, as in --colocate 3,4")
    return layers


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def completing(*choices: str) -> Callable[[str], list[str]]:
    """Return a shell completion function for these choices."""
    return lambda incomplete: [each for each in choices if each.startswith(incomplete)]


def option(
    metavar: str,
    help_text: str,
    parser: Callable[[str], Any] | None = None,
    *,
    names: Sequence[str] = (),
    group: str | None = None,
    words: Sequence[str] = (),
    show_default: bool = False,
    **more: Any,
) -> Any:
    """Declare an option that takes a value.

    Args:
        metavar: stands for the value in ``--help``.
        help_text: its line there.
        parser: makes the value of its text; raises ``typer.BadParameter``.
        names: as in ``("--output", "-o")``; by default that of the parameter.
        group: its section in ``--help``.
        words: the only values, in place of a parser; shells complete them.
        show_default: whether ``--help`` has the default.
        more: keywords of ``typer.Option``.
    """
    return typer.Option(
        *names,
        parser=choice(*words) if words else parser,
        metavar=metavar,
        help=help_text,
        show_default=show_default,
        rich_help_panel=group,
        autocompletion=completing(*words) if words else None,
        **more,
    )


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", show_default=False, help="path/to/file.py:factory or module:factory."),
]
Sample = Annotated[
    str | None,
    option(
        "SHAPE[:DTYPE[:BOUND]]",
        "Make up a sample: 32x3x16x16, or 8x128:int64:50257 for tokens. The first number is the batch size.",
        names=("--input",),
        group="Profiling",
    ),
]
Dtype = Annotated[
    str | None,
    option(
        "NAME",
        f"Cast the model and floating point samples to this precision: {', '.join(FLOATS)}.",
        words=FLOATS,
        group="Profiling",
    ),
]
Layers = Annotated[
    Any,
    option(
        "NAME[,NAME..]",
        "Modules that become layers, with those beside them, in place of the model's blocks; '' for the whole model.",
        _names,
        group="Profiling",
    ),
]
Devices = Annotated[
    str | None,
    option(
        "N|NAMES",
        "Number of accelerators, or of virtual CPU devices; or torch devices as in cuda:0,cuda:1.",
    ),
]
Optimizer = Annotated[
    str,
    option(
        "NAME",
        "Whose state memory figures include: sgd, momentum, adam or adamw.",
        show_default=True,
        group="Profiling",
    ),
]
Threads = Annotated[
    int | None, option("N", "CPU threads per operation while measuring.", min=1, group="Profiling")
]
TimeBudget = Annotated[
    float,
    option(
        "SECONDS",
        "Time to measure each micro-batch size for.",
        min=0,
        show_default=True,
        group="Profiling",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Run the layers to time them; or estimate times, also for a model on the meta device.",
        rich_help_panel="Profiling",
    ),
]
RooflineOf = Annotated[
    str | None,
    option(
        "TEXT|FILE",
        "With --no-measure, the speed that the device reaches: 'cuda: 156 TFLOP/s, 1.5 TB/s, 5 us', or a file made by "
        "Roofline.save.",
        names=("--roofline",),
        group="Profiling",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Output = Annotated[
    Path | None,
    option("FILE.json", "Save the JSON in a file.", _json_file, names=("--output", "-o")),
]
# The parsers of these make pairs and lists, which Typer has no annotation for.
Pin = Annotated[
    list[Any] | None,
    option("LAYER=STAGE", "The stage of a layer; repeatable. Stages count from 0.", _pin, group="Cut"),
]
Compress = Annotated[
    list[Any] | None,
    option(
        "TYPE|TIER=TYPE",
        "Send activations and gradients as bf16 or int8 between hosts, or between devices if there is one host; "
        "network=int8 or link=bf16 name the links between hosts or within one; repeatable. Training is then not exact.",
        _compress,
        group="Devices",
    ),
]
Colocate = Annotated[
    list[Any] | None,
    option("LAYER,LAYER[,..]", "Layers that must share a stage; repeatable.", _layer_group, group="Cut"),
]
NoCutBefore = Annotated[
    list[str] | None, option("LAYER", "A layer that must not start a stage; repeatable.", group="Cut")
]
CutBefore = Annotated[
    list[str] | None,
    option(
        "LAYER",
        "A layer that starts a stage; repeatable. Given once per stage but the first, this is the whole cut.",
        group="Cut",
    ),
]


def compressed(pairs: Sequence[tuple[str, str]]) -> Any:
    """Convert the values of ``--compress`` to the argument of ``pipepart.plan``.

    >>> compressed([("", "bf16")]), compressed([("link", "bf16"), ("network", "int8")])
    ('bf16', {'link': 'bf16', 'network': 'int8'})
    """
    tiers = dict(pairs)
    if len(tiers) < len(pairs) or (len(tiers) > 1 and "" in tiers):
        raise typer.BadParameter(
            "give --compress once with a type alone, or once for each of link=TYPE and network=TYPE"
        )
    return tiers.get("", tiers or None)


def given(context: typer.Context, *names: str) -> list[str]:
    """Return the named options that were given on the command line, as ``--option``."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            off = parameter.secondary_opts and context.params[parameter.name or ""] is False
            found.append((parameter.secondary_opts if off else parameter.opts)[0])
    return found
