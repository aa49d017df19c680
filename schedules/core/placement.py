"""Placements: each function returns the device of every stage, in stage order."""

from .action import ScheduleError


def linear(devices: int) -> tuple[int, ...]:
    """One stage per device: 0, 1, 2, 3."""
    return tuple(range(devices))


def looped(devices: int, chunks: int) -> tuple[int, ...]:
    """Round after round in the same direction: 0, 1, 2, 3, 0, 1, 2, 3 (Narayanan et al. 2021, §2.2)."""
    return tuple(range(devices)) * chunks


def wave(devices: int, chunks: int) -> tuple[int, ...]:
    """Round after round, turning at each end: 0, 1, 2, 3, 3, 2, 1, 0, 0, ... (Liu et al. 2023, Hanayo).

    With two chunks it is the V of Qi et al. 2024 (§6), and the two copies of Chimera in opposite directions.
    """
    there = tuple(range(devices))
    return tuple(device for chunk in range(chunks) for device in (there, there[::-1])[chunk % 2])


def placements(stages: int, devices: int) -> list[tuple[int, ...]]:
    """Return the common placements of stages on devices: linear for one per device, else wave and looped.

    Raises:
        ScheduleError: the stages do not divide evenly over the devices.
    """
    chunks, left = divmod(stages, devices)
    if left or not chunks:
        raise ScheduleError(f"{stages} stages do not divide evenly over {devices} devices; give a placement")
    if chunks == 1:
        return [linear(devices)]
    return [wave(devices, chunks), looped(devices, chunks)]
