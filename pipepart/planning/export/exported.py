"""Export: the files that describe a plan to another engine, and what they leave out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_WIDTH = 100


@dataclass(frozen=True)
class Export:
    """A plan in the files of another engine.

    ``print`` shows the files; :meth:`save` writes them.

    Attributes:
        engine: as given to ``plan.export``.
        files: the text of each file, by its name.
        notes: what the engine has to be told beside these files, and what differs there from the plan. Files that can
            have comments begin with them.
    """

    engine: str
    files: Mapping[str, str] = field(hash=False)
    notes: tuple[str, ...]

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files into a folder, which is made if it does not exist, and return their paths.

        Raises:
            OSError: a file cannot be written.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = [Path(folder) / name for name in self.files]
        for path, text in zip(paths, self.files.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths

    def __str__(self) -> str:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in self.files.items())


def commented(first: str, notes: tuple[str, ...]) -> str:
    """Return a first line and notes as lines that begin with ``#``, as the head of a Python file or a shell script."""
    lines = textwrap.wrap(first, _WIDTH - 2)
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH - 4, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)
