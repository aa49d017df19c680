"""Emulation of virtual devices: separate memories, memory limits, slower devices and slower links."""

from .emulation import DeviceEmulation, emulation_of
from .memory import MemoryUse

__all__ = ["DeviceEmulation", "MemoryUse", "emulation_of"]
