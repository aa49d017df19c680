"""Compares printed text with a file of the repository; ``UPDATE_GOLDEN=1 pytest FILE`` writes the file anew."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(text: str, file: Path) -> None:
    """Assert that a text is that of a file.

    After a change of what is printed, run the test with ``UPDATE_GOLDEN=1`` in the environment, and read the diff.
    """
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"UPDATE_GOLDEN=1 pytest writes {file.name} anew"
