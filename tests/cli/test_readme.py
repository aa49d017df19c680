"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_python_blocks_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(blocks) == 5
    assert "Layers of Sequential" in capsys.readouterr().out


def test_every_option_that_is_written_about_exists() -> None:
    from typer.main import get_command

    from pipepart.cli import app

    command = get_command(app)
    known = {
        option
        for sub in getattr(command, "commands", {}).values()
        for parameter in sub.params
        for option in parameter.opts
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known
