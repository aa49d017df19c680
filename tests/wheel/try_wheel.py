"""Installs the wheel into an empty environment, away from the repository, and runs the first script of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def main(dist: str, constraints: str) -> int:
    """Return 0 if the newest wheel in ``dist`` installs, and runs a command and the script of getting-started.md."""
    wheel = max(Path(dist).glob("pipepart-*.whl"), key=lambda path: path.stat().st_mtime).resolve()
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / "bin" / "python"
        install = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        run(python, *install, "-c", str(Path(constraints).resolve()), str(wheel), cwd=directory)
        # The report has files that are not Python.
        run(python, "-c", blocks[0] + 'assert "<svg" in pipe.plan.to_html()\n', cwd=directory)
        simulate = ["simulate", "--schedule=1f1b", "--devices=2", "--micro-batches=4"]
        run(python, "-m", "pipepart", *simulate, cwd=directory)
        contents = run(python, "-m", "zipfile", "-l", str(wheel), cwd=directory)
        assert ".cpp" not in contents, "the wheel holds C++"
        assert "tests/" not in contents, "the wheel holds tests"
    print(f"{wheel.name}: installed into an empty environment, quick start and command line ran")
    return 0


def run(python: Path, *arguments: str, cwd: str) -> str:
    done = subprocess.run([str(python), *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
