"""Shows ``--help`` as plain text: options in groups, and examples."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

_EXAMPLES = {
    "pipepart": (
        "plan train.py:model --devices 2 -o plan.json",
        "explain plan.json",
        "check train.py:model --plan plan.json",
        "bench train.py:model --plan plan.json --trace trace.json",
        "report plan.json --trace trace.json",
    ),
    "profile": (
        "profile train.py:model --micro-batches 4,8 -o profile.json",
        "profile 'train.py:model(width=64)' --input 32x3x16x16",
    ),
    "plan": (
        "plan train.py:model --devices 2 -o plan.json",
        "plan profile.json --device 24GiB --device 16GiB@0.6 --bandwidth 12GB/s",
    ),
    "explain": ("explain plan.json --trace trace.json", "explain before.json after.json"),
    "simulate": (
        "simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1",
        "simulate --schedule 1f1b --schedule zb-v --devices 4 --micro-batches 8",
        "simulate plan.json --schedule zb-h1 -o step.svg",
    ),
    "report": ("report plan.json --trace trace.json -o report.html", "report before.json after.json"),
    "export": ("export plan.json --to torchtitan -o exported",),
    "check": ("check train.py:model", "check train.py:model --plan plan.json"),
    "bench": ("bench train.py:model --devices 2", "bench train.py:model --plan plan.json --trace trace.json"),
    "env": ("env > environment.txt",),
    "replan": ("replan plan.json --trace trace.json -o next.json",),
    "cluster": (
        "cluster -o cluster.json",
        "cluster --device 24GiB --hosts 2 --devices-per-host 4 --network 25GB/s",
    ),
}


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` has a section for each ``rich_help_panel`` of its options, without Rich."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line without the braces that Typer puts around a metavar."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, options without a group, those of each group in the order of their first one, and -h."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        last = None
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append((parameter.metavar or record[0], record[1]))
            elif parameter.name == "help":
                last = record
            else:
                group = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(group, []).append(record)
        if last is not None:
            sections.setdefault("Output", []).append(last)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(self.name or "", formatter)


class ListedCommands(TyperGroup):
    """The program, whose ``--help`` has the whole first sentence of each command, and examples."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or two for each command."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, f"{(one.help or '').partition('.')[0]}.") for name, one in self.commands.items()]
            )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples("pipepart", formatter)


def _write_examples(name: str, formatter: Any) -> None:
    with formatter.section("Examples"):
        for line in _EXAMPLES[name]:
            formatter.write(f"{'':{formatter.current_indent}}pipepart {line}\n")
