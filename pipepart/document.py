"""Base classes of values that are saved as JSON: strict pydantic models with a version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .input_error import InputError
from .whole_file import write_whole

FORMAT_VERSION = 2

# Sums of a thousand of these fit 64 bits, and each is exact as a float.
ByteCount = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class Value(BaseModel):
    """An immutable value; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Document(Value):
    """A value that can be saved in a file.

    Those that :meth:`load` reads back have a field ``kind``, by which it refuses files of another kind.
    """

    version: int = Field(default=FORMAT_VERSION, ge=FORMAT_VERSION, le=FORMAT_VERSION)

    def save(self, path: str | Path) -> None:
        """Write the value to ``path`` as JSON, atomically."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a value that :meth:`save` wrote.

        Types are strict: ``"4"`` is not a number, and ``4.0`` is not an integer.

        Raises:
            ValueError: the file is not JSON of this class and version. The message lists every fault.
            OSError: the file cannot be read.
        """
        return cls._read(Path(path).read_bytes(), path)

    @classmethod
    def _read(cls, text: bytes, path: str | Path) -> Self:
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            kinds = [fault["input"] for fault in error.errors() if fault["loc"] == ("kind",)]
            if kinds:
                raise InputError(f"{path} is a {kinds[0]}, not a {cls.__name__.lower()}") from None
            versions = [fault["input"] for fault in error.errors() if fault["loc"] == ("version",)]
            if versions and isinstance(versions[0], int):
                raise InputError(
                    f"{path} is a {cls.__name__} of version {versions[0]}, and this pipepart reads version "
                    f"{FORMAT_VERSION}: {'update pipepart' if versions[0] > FORMAT_VERSION else 'make it again'}"
                ) from None
            faults = "\n".join(f"  {fault}" for fault in fault_texts(error))
            raise InputError(f"{path} is not a {cls.__name__} that this version reads:\n{faults}") from None


def fault_texts(error: ValidationError) -> list[str]:
    """Return one text per fault. A list that is too short only because an entry has a fault is not reported."""
    faults = [(".".join(map(str, fault["loc"])), fault) for fault in error.errors()]
    return [
        f"{place or 'file'}: {fault['msg'].removeprefix('Value error, ')}"
        for place, fault in faults
        if fault["type"] != "too_short" or not any(other.startswith(f"{place}.") for other, _ in faults)
    ]
