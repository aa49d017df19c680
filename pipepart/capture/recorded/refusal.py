"""Errors for models that cannot be recorded; they name the line of the user's code."""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from ...input_error import InputError
from .fake_parameters import asks_for_values

_HERE = Path(__file__).parent
_OURS = (_HERE, *(_HERE.parents[1] / room for room in ("loss", "profiling")))
_NOT_THE_USERS = (str(Path(torch.__file__).parent), *map(str, _OURS))
_OF_META_TENSORS = re.compile(r"\b(register_)?meta\b", re.IGNORECASE)
_CALLS = str(_HERE / "replay" / "calls.py")


LAST_RESORT = (
    'As a last resort, layers=[""] makes the whole model one layer, which only replicas can share out'
)
"""The end of the message if a model cannot be recorded."""


class CaptureError(InputError):
    """A model cannot be cut into layers, or a recording of it cannot be replayed.

    Attributes:
        culprit: path of the module that must be opened or left whole for another attempt; None if nothing would help.
    """

    culprit: str | None = None


class LeftAsideError(CaptureError):
    """A module keeps a tensor that it does not return, or others call its parts, so it must be opened."""


class SkeletonError(CaptureError):
    """The forward of a module has an effect that a replay would not repeat, so the module must be whole."""


@contextmanager
def values_refused(layer: str) -> Iterator[None]:
    """Convert an error that torch raises only for meta tensors to an error that names the layer.

    Raises:
        CaptureError: the layer reads values of tensors, or runs an operation that the meta device does not have.
    """
    try:
        yield
    except CaptureError:
        raise
    except (RuntimeError, TypeError) as error:
        if asks_for_values(error):
            raise unknown_value(f"layer {layer!r}", _line_of(error)) from error
        if not _OF_META_TENSORS.search(text := str(error)):
            raise
        why = textwrap.shorten(text.splitlines()[0].rstrip(".!"), 120)
        if "expected device" in why or "two different devices" in why:
            raise CaptureError(
                f"layer {layer!r} uses tensors of the meta device and of another one: {why}. Tensors in closures, "
                "globals and objects are not found: hold them as buffers of the module"
            ) from error
        raise CaptureError(
            f"layer {layer!r} cannot run on the meta device, where tensors have no values: {why}. Construct "
            "the model on a real device and measure it (measure=True)"
        ) from error


def unknown_value(who: str, line: str) -> CaptureError:
    """Return the error for code that reads a value of a fake tensor; ``line`` is its place."""
    return CaptureError(
        f"{who} reads values of tensors at {line}, or makes tensors whose shapes depend on them. The model is on the "
        "meta device, or this process has only some of its layers, so while it is recorded only the arguments, and "
        "what is computed from them alone, have values. If it reads an argument, pass that in every process, on a real "
        "device; otherwise compute with tensors, as by torch.where, or use one process and a real device (measure=True)"
    )


def line_of_user() -> str:
    """Return file and line of the innermost frame outside of torch and of this package's recorder and losses.

    While a recorded call is replayed, this is the line that was recorded.
    """
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        if frame.f_code.co_filename == _CALLS and frame.f_code.co_name == "run":
            return frame.f_locals["self"].line
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return _place(frame.f_code.co_filename, frame.f_lineno)


def _line_of(error: BaseException) -> str:
    """Return file and line of the innermost frame of the user's code that an error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    return _place(frames[-1].filename, frames[-1].lineno) if frames else "an unknown line"


def _is_ours(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS)


@lru_cache(maxsize=1024)
def _place(file: str, line: int | None) -> str:
    """Return a line with two parts of the path of its file: there are many files modeling.py and __init__.py."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"
