"""Errors for invalid arguments: values, files or models that cannot be used."""

from __future__ import annotations


class Refused(Exception):  # never raised itself
    """Base class of errors whose message tells the caller what to pass instead.

    The command line ends with status 2 for these, without a traceback. Every other exception is a bug, or comes from
    the caller's own model, and keeps its traceback.
    """


class InputError(Refused, ValueError):
    """A value that cannot be used."""


class InputTypeError(Refused, TypeError):
    """An object of the wrong type."""
