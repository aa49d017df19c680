"""Virtual devices that mind what lives on them, as accelerators do."""

from .condition import Strict
from .ledger import MemoryUse

__all__ = ["MemoryUse", "Strict"]
