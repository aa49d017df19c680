"""The JSON form of a schedule: its fields and their types."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .action import ScheduleError

_NUMBERS = tuple[int, ...]


class ScheduleFields(BaseModel):
    """The JSON form of a `Schedule`: its fields, with each action as text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    name: str
    micro_batches: int = Field(ge=0)
    device_of: _NUMBERS
    replicas: int = Field(ge=1)
    versions: tuple[_NUMBERS, ...]
    actions: tuple[tuple[str, ...], ...]


def read_fields(text: str) -> ScheduleFields:
    """Parse the fields of a schedule from JSON.

    Raises ScheduleError if the text is no JSON, or a field is missing, unknown or of another type.
    """
    try:
        return ScheduleFields.model_validate_json(text)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'the text'}: {fault['msg']}" for fault in error.errors()
        ]
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ScheduleError(
            f"not a schedule as Schedule.to_json writes it: {'; '.join(faults[:3])}{more}"
        ) from None
