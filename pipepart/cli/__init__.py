"""The command line: ``pipepart COMMAND``."""

from .app import app

__all__ = ["app"]
