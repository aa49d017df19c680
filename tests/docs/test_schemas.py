"""docs/schemas: the JSON Schemas of what commands print are those of the code, and docs/json.md names each."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipepart.cli.schemas import PRINTED, schema_text

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PRINTED)
def test_the_schema_that_is_written_down_is_that_of_the_code(name: str) -> None:
    written = (DOCS / "schemas" / f"{name}.json").read_text("utf-8")
    assert written == schema_text(name), "run: python -m pipepart.cli.schemas docs/schemas"


def test_the_page_names_every_schema() -> None:
    page = (DOCS / "json.md").read_text("utf-8")
    assert {path.stem for path in (DOCS / "schemas").iterdir()} == set(PRINTED)
    assert all(f"schemas/{name}.json" in page for name in PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_every_document_has_a_version(name: str) -> None:
    assert PRINTED[name].model_json_schema()["properties"]["version"]["default"] == 1
