"""Values that are saved as JSON: pydantic models with a version, strict about what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FORMAT_VERSION = 1


class Value(BaseModel):
    """An immutable value; fields that it does not know are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Document(Value):
    """A value that stands in a file of its own."""

    version: int = Field(default=FORMAT_VERSION, ge=1, le=FORMAT_VERSION)

    def save(self, path: str | Path) -> None:
        """Writes the value to ``path`` as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a value that :meth:`save` wrote.

        Raises:
            ValueError: the file is no JSON of this kind and version; every fault is named.
            OSError: the file cannot be read.
        """
        try:
            return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except ValidationError as error:
            faults = "\n".join(
                f"  {'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}" for fault in error.errors()
            )
            raise ValueError(f"{path} is not a {cls.__name__} that this version reads:\n{faults}") from None
