"""Export: a plan as files of another engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...whole_file import write_whole


@dataclass(frozen=True)
class Export:
    """A plan as files of another engine. Printing it shows the files; :meth:`save` writes them.

    Attributes:
        engine: name of the engine.
        files: file name -> text. The file with the stages begins with comments on what the plan needs besides.
    """

    engine: str
    files: Mapping[str, str] = field(hash=False)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files into a folder, which is created if needed, and return their paths.

        Raises:
            OSError: a file cannot be written.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = [Path(folder) / name for name in self.files]
        for path, text in zip(paths, self.files.values(), strict=True):
            write_whole(path, text)
        return paths

    def __str__(self) -> str:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in self.files.items())
