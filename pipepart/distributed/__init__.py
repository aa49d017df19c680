"""One pipeline on several processes: which rank has what, and what ranks agree on before and share after a call."""

from .multi_process import join, making, planned_once
from .single_process import SingleProcess

__all__ = ["SingleProcess", "join", "making", "planned_once"]
