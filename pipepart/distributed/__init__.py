"""One pipeline on several processes: who has what, what they agree on before a call, and what they share behind it."""

from .alone import Alone
from .joined import join, making, planned_once

__all__ = ["Alone", "join", "making", "planned_once"]
