"""Converts micro-batches to inputs of a recorded model's first layer, and joins the outputs of its last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import Chain, RecordedChain, Unfinished, finish
from ..input_error import InputTypeError
from .arguments import Arguments
from .gather import Merger, gather
from .split import Apart, MicroBatches

_LOSS = object()  # in place of the loss in an output


def entered(chain: Chain, batch: MicroBatches) -> MicroBatches:
    """Convert micro-batches to inputs of the first layer of a chain.

    The arguments of a recorded model become live values of its recordings. If the model computes its own loss, the
    arguments that only the loss needs, such as labels, become the targets.

    Raises:
        CaptureError: the model cannot be recorded with them.
        TypeError: the model computes its own loss, and there is a target as well.
    """
    if not isinstance(chain, RecordedChain):
        return batch
    calls = [Arguments.of_input(value) for value in batch.inputs]
    bound = chain.bind_all([(arguments.args, arguments.kwargs) for arguments in calls])
    batch = batch._replace(inputs=[call.live for call in bound])
    if all(call.live.recording.loss is None for call in bound):
        return batch
    if batch.target is not None:
        raise InputTypeError(
            f"the {type(chain.model).__name__} computes its own loss from the arguments that it was given, and there "
            "is a target=... as well: leave out one of them, or pass loss_fn=..."
        )
    return batch._replace(targets=[call.rest for call in bound], target=Apart())


def gathered(
    outputs: Sequence[Any], batch: MicroBatches, merge: Merger | None, loss: Tensor | None = None
) -> Any:
    """Join the outputs of micro-batches like :func:`gather`; also supports models that compute their own loss.

    Args:
        outputs, batch, merge: as for :func:`gather`.
        loss: of the mini-batch, in place of the losses of the micro-batches.
    """
    if not any(isinstance(output, Unfinished) for output in outputs):
        return gather(outputs, batch, merge)
    if merge is not None:
        return merge([finish(*pair, loss) for pair in zip(outputs, batch.targets, strict=True)])
    finished = [finish(*pair, _LOSS) for pair in zip(outputs, batch.targets, strict=True)]
    return pytree.tree_map(lambda leaf: loss if leaf is _LOSS else leaf, gather(finished, batch))
