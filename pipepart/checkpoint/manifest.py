"""Manifest: the sizes and hashes of a checkpoint's files, to detect damage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from ..document import ByteCount, Document, Value
from ..input_error import InputError
from ..units import counted

MANIFEST = "manifest.json"


class CheckpointError(InputError):
    """A checkpoint is damaged: a file of it is missing, cut off or changed. The message names the file."""


class FileRecord(Value):
    """The size and the hash of a file."""

    bytes: ByteCount
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


# Of a file in the directory of the manifest: a path to elsewhere is none.
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Manifest(Document):
    """The files of a checkpoint.

    Attributes:
        step: of the training.
        ranks: the number of processes that wrote it.
        tied: further names of tensors, each with the name under which the tensor is saved.
        files: by name.
        sha256: of this document with an empty one in its place.
    """

    step: Annotated[int, Field(ge=0)]
    ranks: Annotated[int, Field(ge=1)]
    tied: Mapping[str, str]
    files: Mapping[FileName, FileRecord]
    sha256: str = ""

    def sealed(self) -> Self:
        """Return the manifest with a hash of itself."""
        return self.model_copy(update={"sha256": self._own_hash()})

    def content(self) -> bytes:
        """Return the content of the file."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: there is none, or a byte of it was changed.
            OSError: it cannot be read.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise CheckpointError(f"{str(path)!r} is missing")
        content = path.read_bytes()
        try:
            manifest = cls.model_validate_json(content, strict=True)
        except ValidationError as error:
            raise CheckpointError(
                f"{str(path)!r} is damaged, or of a newer version of pipepart: it is no manifest that this one reads"
            ) from error
        # The same content and the same hash, so that no byte can differ, not even a space.
        if manifest.content() != content or manifest.sha256 != manifest._own_hash():
            raise CheckpointError(f"{str(path)!r} is damaged: its hash is not the one in it")
        return manifest

    def check(self, directory: Path, names: Sequence[str] | None = None) -> None:
        """Compare files with their sizes and hashes; all of them by default.

        Raises:
            CheckpointError: names the first file that is missing or differs.
            OSError: a file cannot be read.
        """
        for name in self.files if names is None else names:
            path, record = directory / name, self.files[name]
            if not path.is_file():
                raise CheckpointError(f"{str(path)!r} is missing")
            size = path.stat().st_size
            if size != record.bytes:
                raise CheckpointError(f"{str(path)!r} has {counted(size, 'byte')} in place of {record.bytes}")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    raise CheckpointError(f"{str(path)!r} is damaged: its hash is not that of the manifest")

    def _own_hash(self) -> str:
        return hashlib.sha256(self.model_copy(update={"sha256": ""}).content()).hexdigest()
