"""Virtual devices that mind what lives on them, as accelerators do."""

from .condition import Strict
from .ledger import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryUse

__all__ = ["GRADIENTS", "OPTIMIZER", "PARAMETERS", "MemoryUse", "Strict"]
