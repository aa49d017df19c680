"""A directive that shows what a command prints for ``--help``: ``{command-help} plan``."""

from __future__ import annotations

import os
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from typer.testing import CliRunner


class CommandHelp(Directive):
    """The help of a command as a literal block; without an argument that of ``pipepart`` itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Run the command line in this process."""
        from pipepart.cli import app

        width = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = "88"
        try:
            result = CliRunner().invoke(app, [*self.arguments, "--help"], prog_name="pipepart")
        finally:
            if width is None:
                del os.environ["COLUMNS"]
            else:
                os.environ["COLUMNS"] = width
        if result.exit_code:
            raise self.error(f"--help of {self.arguments} ended with {result.exit_code}: {result.output}")
        block = nodes.literal_block(result.output, result.output)
        block["language"] = "text"
        return [block]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
