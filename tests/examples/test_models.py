"""Each example has a model, a sample, a target and a loss that fit each other; CI runs the examples themselves."""

from __future__ import annotations

import difflib
from pathlib import Path


def test_a_pipeline_changes_three_lines_of_a_training_script() -> None:
    plain, piped = (
        Path(f"examples/transformers_{name}.py").read_text(encoding="utf-8").splitlines()[1:]
        for name in ("plain", "finetune")
    )
    changes = [line for line in difflib.unified_diff(plain, piped, n=0, lineterm="") if line[:1] in "+-"][2:]
    added = [line[1:].strip() for line in changes if line.startswith("+") and line.strip("+ ")]
    assert len(added) == 3
    assert [line[1:].strip() for line in changes if line.startswith("-")] == [
        "loss = model(**sample(data)).loss",
        "loss.backward()",
    ]
