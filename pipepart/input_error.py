"""The errors for what a caller gave: a value, a file, a model that cannot be used as it is."""

from __future__ import annotations


class Refused(Exception):  # never raised itself
    """Base of the errors whose message tells the caller what to give instead.

    The command line ends with status 2 for these, without a traceback. Every other exception is a bug, or comes from
    the caller's own model, and keeps its traceback.
    """


class InputError(Refused, ValueError):
    """A value that cannot be used."""


class InputTypeError(Refused, TypeError):
    """An object of the wrong type."""
