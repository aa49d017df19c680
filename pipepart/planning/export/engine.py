"""Export: a plan as files of another engine. Engine: the features of an engine, and functions that write its files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...whole_file import write_whole
from ..plans.plan_record import PlanRecord

_WIDTH = 100


@dataclass(frozen=True)
class Export:
    """A plan as files of another engine. Printing it shows the files; :meth:`save` writes them.

    Attributes:
        engine: name of the engine.
        files: file name -> text.
        notes: further settings of the engine, and differences from the plan. The file with the stages begins with these
            notes.
    """

    engine: str
    files: Mapping[str, str] = field(hash=False)
    notes: tuple[str, ...]

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


@dataclass(frozen=True)
class Engine:
    """The features of an engine, and functions that write a plan for it.

    Attributes:
        files: from a plan and all notes, returns file name -> text. Called only for plans without faults.
        notes: returns further settings of the engine, and differences from the plan.
        faults: returns reasons why the engine cannot run a plan, each with what to plan instead. Reasons that follow
            from the fields below are added to these.
        schedules: names of the schedules that the engine has; empty if it reads the order of the actions.
        recomputes: True if the engine can recompute all stages.
        far_values: beginning of a note on values used beyond the next stage; empty if the engine cannot run such plans.
        adds_up_ties: returns True if the engine sums the gradients of two layers that share tensors, by layer name.
    """

    files: Callable[[PlanRecord, Sequence[str]], Mapping[str, str]]
    notes: Callable[[PlanRecord], Iterable[str]]
    faults: Callable[[PlanRecord], Iterable[str]] = lambda plan: ()
    schedules: tuple[str, ...] = ()
    recomputes: bool = True
    far_values: str = ""
    adds_up_ties: Callable[[PlanRecord, str, str], bool] = lambda plan, owner, name: False


def commented(title: str, notes: Sequence[str]) -> str:
    """Format a title and notes as comment lines (``#``), for the head of a Python file or shell script."""
    lines = textwrap.wrap(title, _WIDTH - 2)
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH - 2, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def python_list(name: str, rows: Iterable[object]) -> str:
    """Return Python source that assigns a list to a name, with one element per line."""
    return f"{name} = [\n" + "".join(f"    {row!r},\n" for row in rows) + "]\n"
