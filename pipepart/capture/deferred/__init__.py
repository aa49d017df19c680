"""Models without memory: their construction is logged, and replayed for the tensors that a stage needs."""

from .context import deferred_init
from .seal import attributes_of, refuse_unknown, unseal, writes_allowed
from .values import values_of

__all__ = ["attributes_of", "deferred_init", "refuse_unknown", "unseal", "values_of", "writes_allowed"]
