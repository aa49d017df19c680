"""Values that are saved as JSON: pydantic models with a version, strict about what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FORMAT_VERSION = 1

# Sums of a thousand of the largest fit a machine's integer, and each is exact as a float.
ByteCount = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


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

        A number in quotes is no number, and 4.0 is no count.

        Raises:
            ValueError: the file is no JSON of this kind and version; every fault is named.
            OSError: the file cannot be read.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes(), strict=True)
        except ValidationError as error:
            faults = "\n".join(f"  {fault}" for fault in fault_texts(error))
            raise ValueError(f"{path} is not a {cls.__name__} that this version reads:\n{faults}") from None


def fault_texts(error: ValidationError) -> list[str]:
    """One text a fault; a list that is too short only because an entry of it has one is none."""
    faults = [(".".join(map(str, fault["loc"])), fault) for fault in error.errors()]
    return [
        f"{place or 'file'}: {fault['msg'].removeprefix('Value error, ')}"
        for place, fault in faults
        if fault["type"] != "too_short" or not any(other.startswith(f"{place}.") for other, _ in faults)
    ]
