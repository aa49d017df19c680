"""Splits the arguments of a call into micro-batches, and joins their outputs into one output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .arguments import arguments_of_call, check_arguments
from .split import BATCH_NORMS, Merger, MicroBatches, Splitter, gather, least_samples, micro_batches_of


class Batching:
    """Splits and joins the calls of one model.

    Args:
        first_layer: the name of the model's first layer, and the layer.
        modules: all modules of the model.
        micro_batches: parts of a mini-batch, at most.
        split, merge: functions of the user that replace the default rule, or None.
    """

    def __init__(
        self,
        first_layer: tuple[str, nn.Module],
        modules: Iterable[nn.Module],
        micro_batches: int,
        split: Splitter | None,
        merge: Merger | None,
    ) -> None:
        self._first_layer = first_layer
        self._norms = [module for module in modules if isinstance(module, BATCH_NORMS)]
        self._micro_batches = micro_batches
        self._split, self._merge = split, merge
        # Forms of calls that were checked against the first layer.
        self._accepted: set[tuple[int, tuple[str, ...]]] = set()

    def parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> MicroBatches:
        """Return the micro-batches of a call ``pipe(*args, **kwargs)``.

        Raises:
            TypeError, ValueError: the first layer does not take the arguments, or they cannot be split.
        """
        given = arguments_of_call(args, kwargs)
        form = len(given.args), tuple(given.kwargs)
        if form not in self._accepted:
            check_arguments(*self._first_layer, given, target)
            self._accepted.add(form)
        least = least_samples(self._norms)
        return micro_batches_of(given.input, target, self._micro_batches, self._split, least)

    def joined(self, outputs: Sequence[Any], batch: MicroBatches) -> Any:
        """Return the output of the mini-batch.

        Raises:
            TypeError, ValueError: the outputs cannot be joined.
        """
        return gather(outputs, batch, self._merge)
