"""The notebook runs, and its objects show themselves in the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path("examples/tour.ipynb")


@pytest.mark.slow  # make examples runs it too
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_becomes_a_page() -> None:
    nbclient, nbformat, nbconvert, _ = (
        pytest.importorskip(name) for name in ("nbclient", "nbformat", "nbconvert", "ipykernel")
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none is committed
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) == 4  # profile, plan, trace, timeline
    profile, plan, trace, timeline = shown
    assert "Profile of Sequential: 17 layers" in profile
    assert "virtual:1" in plan
    assert "measured" in trace
    assert "predicted" in trace
    assert "zb-v" in timeline
    assert all("<script" not in each for each in shown)
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count("<svg") >= 3
