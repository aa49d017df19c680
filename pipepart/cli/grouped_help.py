"""Shows the options of a command in groups, as plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` has a section for each ``rich_help_panel`` of its options, without Rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of each group in the order of their first one, and then the others."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        others: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            group = getattr(parameter, "rich_help_panel", None)
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(record)
            elif group:
                sections.setdefault(group, []).append(record)
            else:
                others.append(record)
        for title, records in (*sections.items(), ("Options", others)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
