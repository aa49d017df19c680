"""Texts that are compared with files."""

import os
import re
from pathlib import Path


def check_golden(text: str, file: Path) -> None:
    """Assert that a text is that of a file; with ``UPDATE_GOLDEN=1`` in the environment, write the file anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def text_of(html: str) -> str:
    """Return the text of a page: a line for each row of a table, and pictures by what they are of."""
    for pattern, instead in (
        (r"(?s)<(style|script)\b.*?</\1>", ""),
        (r"(?s)<svg(?:(?!</svg>).)*<desc>(.*?)</desc>.*?</svg>", r"[picture of \1]"),
        (r"(?s)<svg.*?</svg>", "[picture]"),
        (r"\s+", " "),
        (r"</t[hd]>(?=<t[hd])", " | "),
        (r"</(tr|p|caption|summary|h[1-6]|div|figcaption|li|dd|dt|a)>", "\n"),
        (r"<[^>]+>", " "),
        (r" +", " "),
        (r" *\n\s*", "\n"),
    ):
        html = re.sub(pattern, instead, html)
    return html.strip() + "\n"
