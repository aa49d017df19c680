"""Section: one part of the report, with the data and the files of its script."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...units import format_bytes, format_seconds
from ..quantity import percent

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """One part of the page.

    A section that has a script gets its element, ``data`` and ``columns``::

        pipepart.section("memory", (root, data, columns) => { ... });

    Attributes:
        key: names the section in addresses and in its script; letters and dashes.
        title: its heading.
        html: its body, from :func:`render`. It holds a table of what each chart shows.
        data: what its script gets, as JSON.
        columns: long columns of numbers for its script, which gets them as typed arrays. They are stored compressed.
        assets: files of the folder ``assets`` that it needs, ``.js`` and ``.css``. A file that several sections name
            is in the page once.
    """

    key: str
    title: str
    html: Markup
    data: Any = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    assets: tuple[str, ...] = ()

    @property
    def packed_columns(self) -> dict[str, Any] | None:
        """The columns as JSON: the offset of each in one compressed block, and the block in base64."""
        if not self.columns:
            return None
        parts, layout, at = [], {}, 0
        for name, column in self.columns.items():
            # Typed arrays begin at a multiple of 8 bytes.
            part = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
            layout[name] = (_TYPED_ARRAYS[column.dtype.name], at, column.size)
            parts.append(part + bytes(-len(part) % 8))
            at += len(parts[-1])
        block = zlib.compress(b"".join(parts), 6)
        return {"layout": layout, "block": base64.b64encode(block).decode("ascii")}


_TYPED_ARRAYS = {
    "uint8": "Uint8Array",
    "uint16": "Uint16Array",
    "uint32": "Uint32Array",
    "int32": "Int32Array",
    "float32": "Float32Array",
    "float64": "Float64Array",
}


def render(template: str, **values: Any) -> Markup:
    """Render a file of the folder ``templates``. Every value that is not Markup is escaped."""
    return Markup(_environment().get_template(template).render(**values))


def asset(name: str) -> Markup:
    """Return a file of the folder ``assets``, which needs no escaping."""
    return Markup((_FOLDER / "assets" / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(seconds=format_seconds, bytes=format_bytes, percent=percent, code=_code)
    return found


def _code(words: str) -> Markup:
    """Return a sentence whose names in backticks are code."""
    parts = (
        Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(words.split("`"))
    )
    return Markup("").join(parts)
