"""The README and every page of docs/: Python blocks run, console blocks print what they show.

- ``python`` blocks of a page run in order, in one namespace, in an empty directory with the files of docs/examples.
  Blocks with ``>>>`` are doctests.
- In ``console`` blocks each ``$ pipepart ...`` line runs. Its output must be what stands below it, with ``...`` for
  any text. In ``console measured`` blocks figures are not compared, only the words.
"""

from __future__ import annotations

import difflib
import doctest
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import schedules
from pipepart.cli import app

pytestmark = pytest.mark.usefixtures("short_profiles")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN = (
    "standalone", "nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port", "max-restarts",
    "rdzv-backend", "rdzv-endpoint",
)  # fmt: skip
_FENCE = re.compile(r"^( *)```(\{?\w[\w-]*\}?)?([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    info: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[2] or "", match[3].strip(), match[4], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory but for the files of docs/examples and examples."""
    for source in (ROOT / "docs" / "examples").iterdir():
        shutil.copy(source, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def _one_command() -> Iterator[None]:
    """Reading the options of all commands takes 40 ms a call, so that it is done once."""
    with pytest.MonkeyPatch.context() as patch:
        command = get_command(app)
        patch.setattr("typer.testing._get_command", lambda _: command)
        yield


def with_blocks(language: str) -> list[object]:
    pages = [page for page in PAGES if any(block.language == language for block in blocks_of(page))]
    return [pytest.param(page, id=page.stem) for page in pages]


def test_the_gallery_has_every_schedule() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert re.findall(r"{schedule-picture} (\S+)", gallery) == list(schedules.names())


@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_blocks_run_in_order(page: Path, directory: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python" and ">>>" in block.text:
            run_doctest(block, names, page)
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec"), names)
    # An output with its graph reaches these names by the code of the model, which the garbage collector cannot see.
    names.clear()


@pytest.mark.parametrize("page", with_blocks("console"))
def test_commands_print_what_the_page_shows(page: Path, directory: Path) -> None:
    for block in blocks_of(page):
        if block.language == "console":
            check_console(block, page)


def check_console(block: Block, page: Path) -> None:
    parts = _COMMAND.split(block.text)
    assert len(parts) > 1, f"{page}:{block.line}: a console block without a command"
    for command, shown in zip(parts[1::2], parts[2::2], strict=True):
        program, *arguments = command.replace("\\\n", " ").split()
        if program != "pipepart":
            continue
        printed = CliRunner().invoke(app, arguments).output
        measured = "measured" in block.info
        wanted, got = (words(text) if measured else rows(text) for text in (shown, printed))
        assert not wanted or doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), (
            f"{page}:{block.line}: pipepart {' '.join(arguments)} printed\n{printed}"
        )


def run_doctest(block: Block, names: dict[str, object], page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, page.name, str(page), block.line - 1)
    test.globs = names
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def rows(text: str) -> str:
    """A text without trailing spaces and empty lines at its end."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n" if text.strip() else ""


def words(text: str) -> str:
    """A text without its figures, bars and units, one space between words."""
    text = re.sub(r"[─█▏▎▍▌▋▊▉]+|\b(?:µs|ms|s|KiB|MiB|GiB|B)\b", " ", text)
    text = re.sub(r"[<+-]?\d[\d.,]*(?:e[+-]?\d+)?%?", " ", text)
    return " ".join(text.split()) + "\n" if text.strip() else ""


def test_every_option_that_pages_write_about_exists() -> None:
    command = get_command(app)
    known = {
        option
        for sub in getattr(command, "commands", {}).values()
        for parameter in sub.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "--version", "--seed"}
    known |= {f"--{name}" for name in TORCHRUN}
    for page in PAGES:
        shells = [block.text for block in blocks_of(page) if block.language in ("sh", "console")]
        text = "\n".join([*shells, *re.findall(r"`(--[^`]*)`", page.read_text(encoding="utf-8"))])
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known, page.name


def test_a_pipeline_changes_three_lines_of_a_training_script() -> None:
    plain, piped = (
        (ROOT / f"examples/transformers_{name}.py").read_text(encoding="utf-8").splitlines()[1:]
        for name in ("plain", "finetune")
    )
    changes = [line for line in difflib.unified_diff(plain, piped, n=0, lineterm="") if line[:1] in "+-"][2:]
    added = [line[1:].strip() for line in changes if line.startswith("+") and line.strip("+ ")]
    assert len(added) == 3
    assert [line[1:].strip() for line in changes if line.startswith("-")] == [
        "loss = model(**sample(data)).loss",
        "loss.backward()",
    ]
