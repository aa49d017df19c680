"""Export: a plan in the files of another engine. Engine: what such an engine can run, and how its files are written."""

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
    """A plan in the files of another engine. Printing it shows the files, and :meth:`save` writes them.

    Attributes:
        engine: the name of the engine.
        files: the text of each file, by its name.
        notes: what to tell the engine beside these files, and what differs there from the plan. They also stand at the
            beginning of the file that has the stages.
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
            write_whole(path, text)
        return paths

    def __str__(self) -> str:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in self.files.items())


@dataclass(frozen=True)
class Engine:
    """What an engine can run, and how a plan is written for it.

    Attributes:
        files: the text of each file by its name, given all notes. Called for plans without faults only.
        notes: what to tell the engine beside the files, and what differs there from the plan.
        faults: reasons why the engine cannot run a plan, each with what to plan instead, besides those that follow from
            the fields below.
        schedules: names of those that it has; empty if it reads the order of the actions.
        recomputes: whether it can recompute all stages.
        far_values: the beginning of a note on values that are used in a stage behind the next one; empty if the engine
            cannot run such plans.
        adds_up_ties: whether it adds up the gradients of two layers, given by name, that share tensors.
    """

    files: Callable[[PlanRecord, Sequence[str]], Mapping[str, str]]
    notes: Callable[[PlanRecord], Iterable[str]]
    faults: Callable[[PlanRecord], Iterable[str]] = lambda plan: ()
    schedules: tuple[str, ...] = ()
    recomputes: bool = True
    far_values: str = ""
    adds_up_ties: Callable[[PlanRecord, str, str], bool] = lambda plan, owner, name: False


def commented(title: str, notes: Sequence[str]) -> str:
    """Return a title and notes as lines that begin with ``#``: the head of a Python file or a shell script."""
    lines = textwrap.wrap(title, _WIDTH - 2)
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH - 2, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def python_list(name: str, rows: Iterable[object]) -> str:
    """Return the assignment of a list to a name as Python source, one element a line."""
    return f"{name} = [\n" + "".join(f"    {row!r},\n" for row in rows) + "]\n"
