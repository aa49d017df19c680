"""Models without memory: their construction is logged, and replayed for the tensors that a stage needs."""

from .context import deferred_init
from .replay import replay
from .seal import attributes_of, is_deferred, refuse_unknown, values_of

__all__ = ["attributes_of", "deferred_init", "is_deferred", "refuse_unknown", "replay", "values_of"]
