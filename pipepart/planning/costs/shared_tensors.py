"""Bytes of tied parameters and buffers: the copies in later stages, and the gradients of the copies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...profiling import Profile
from .stage_memory import Ints


class SharedTensors:
    """The parameters and buffers that layers of a profile share with earlier layers. False if there are none.

    A stage copies such a tensor once: at its first user in the stage, if the previous user is in an earlier stage. It
    sends the gradient of its copy to the stage of the previous user, for each micro-batch.

    The methods take the first layer of stages and their ends, and return bytes for each end: [ends].

    Args:
        profile: has the layers.
        index: the position of each layer, by its name.
    """

    def __init__(self, profile: Profile, index: Mapping[str, int]) -> None:
        latest: dict[tuple[str, str], int] = {}
        table = []
        for position, info in enumerate(profile.layers):
            for tensor in info.shared:
                key = tensor.layer, tensor.name
                previous = latest.get(key, index[tensor.layer])
                latest[key] = position
                table.append(
                    (previous, position, tensor.bytes + tensor.gradient_bytes, tensor.gradient_bytes)
                )
        uses = np.array(table, dtype=np.int64).reshape(-1, 4)
        self._previous, self._layer = uses[:, :1], uses[:, 1:2]
        self._bytes, self._gradient_bytes = uses[:, 2], uses[:, 3]

    def __bool__(self) -> bool:
        return self._bytes.size > 0

    def copied(self, start: int, ends: Ints) -> Ints:
        """Return the bytes of the copies that the stages hold and of the gradients of these copies."""
        return self._bytes @ ((self._previous < start) & (start <= self._layer) & (self._layer < ends))

    def arriving_gradients(self, start: int, ends: Ints) -> Ints:
        """Return the bytes of the gradients that the stages receive from later stages for a micro-batch."""
        return self._gradient_bytes @ (
            (start <= self._previous) & (self._previous < ends) & (ends <= self._layer)
        )
