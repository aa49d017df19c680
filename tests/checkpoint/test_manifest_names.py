"""A manifest with file names outside of its own directory is rejected."""

from pathlib import Path

import pytest
from torch import nn

import pipepart
from pipepart.checkpoint.manifest import MANIFEST, CheckpointError, Manifest


@pytest.mark.parametrize(
    "name", ["model-x/../../../model-secret.safetensors", "/model-secret.safetensors", "..", ""]
)
def test_a_path_to_another_directory_is_refused(name: str, tmp_path: Path):
    pipepart.save(tmp_path / "run", nn.Linear(2, 2), step=1)
    directory = tmp_path / "run" / "step-1"
    manifest = Manifest.read(directory)
    one = manifest.files["model-00001-of-00001.safetensors"]
    forged = manifest.model_copy(update={"files": {**manifest.files, name: one}}).sealed()
    (directory / MANIFEST).write_bytes(forged.content())
    with pytest.raises(CheckpointError, match="it is no manifest that this one reads"):
        pipepart.load(tmp_path / "run", nn.Linear(2, 2))
