"""The command line: ``pipepart COMMAND``."""

from .main import app

__all__ = ["app"]
