"""Formats keywords of ``plan()`` as Python arguments or as command-line options, to copy and paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any


def as_arguments(keywords: Mapping[str, Any]) -> str:
    """Format keywords as arguments of :func:`pipepart.plan`.

    >>> as_arguments({"schedule": "1f1b", "stages": 2})
    "schedule='1f1b', stages=2"
    """
    return ", ".join(f"{name}={value!r}" for name, value in keywords.items())


def as_options(keywords: Mapping[str, Any]) -> str:
    """Format keywords as options of ``pipepart plan``, without those that are None, False or empty.

    >>> as_options({"schedule": "1f1b", "compress": {"link": "int8"}, "colocate": [["a", "b c"]]})
    "--schedule 1f1b --compress link=int8 --colocate 'a,b c'"
    """
    return " ".join(text for name, value in keywords.items() for text in _option(name, value))


def _option(name: str, value: Any) -> Iterator[str]:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        yield option
    elif isinstance(value, Mapping):
        yield from (f"{option} {quote(f'{key}={each}')}" for key, each in value.items())
    elif isinstance(value, list | tuple):
        texts = (each if isinstance(each, str) else ",".join(each) for each in value)
        yield from (f"{option} {quote(text)}" for text in texts)
    elif value is not None and value is not False:
        yield f"{option} {quote(str(value))}"
