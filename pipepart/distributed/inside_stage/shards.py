"""StageShards: gathers and reduces what is sharded within the stages of a rank, in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from schedules import Kind

from ...dtensors import is_dtensor
from ...ranks import Ranks, broke
from ...runtime.stage_run import StageRun
from ...runtime.state.shared_parameters import SharedParameters
from ...runtime.transport.reductions import Reductions
from .units import Unit

Compute = Callable[[Any, Any], Any]


class StageShards(Reductions):
    """The sharded parameters of the stages of one rank, and the others, which replicas add up.

    A rank runs its stages on one worker, which calls all methods but :meth:`begin`. Ranks of one stage make the same
    calls in the same order.

    Args:
        ranks: the processes.
        replica: of this rank.
        groups: by worker, the ranks that have its stages with other micro-batches; of one rank without replicas.
        units: the FSDP units of each stage.
    """

    def __init__(
        self,
        ranks: Ranks,
        replica: int,
        groups: Mapping[int, dist.ProcessGroup],
        units: Mapping[SharedParameters, Sequence[Unit]],
    ) -> None:
        super().__init__(ranks, replica, groups)
        self._units = units
        self._group = next(iter(groups.values()))
        self._is_alone = self._group.size() == 1
        self._sharded = {
            parameter for group in units.values() for unit in group for parameter in unit.parameters
        }

    @property
    def reshards(self) -> bool:
        """Whether a unit gathers its parameters for each forward and backward."""
        return any(unit.reshards for group in self._units.values() for unit in group)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Gather all units, and scatter them behind the actions.

        All are gathered first, so that ranks with more or fewer micro-batches gather in one order.

        Raises:
            RankError: another rank has failed, or a connection broke.
        """
        every = [unit for group in self._units.values() for unit in group]
        try:
            for unit in every:
                unit.gather()
            yield
            if self._is_alone:  # whose schedule has no REDUCE_GRAD
                for shared in self._units:
                    self._reduce(shared)
            for unit in every:
                unit.scatter()
        except BaseException as error:
            for unit in every:
                if unit.is_root:
                    with suppress(Exception):
                        unit.reset()
            if not broke(error):
                raise
            lost = self._ranks.lost(error)
            for note in getattr(error, "__notes__", ()):
                lost.add_note(note)
            raise lost from None

    def around(self, kind: Kind, run: StageRun, compute: Compute) -> Compute:
        """Return the computation of an action of a stage with what FSDP does behind a backward, for W."""
        if kind is not Kind.W:
            return compute

        def computed(micro_batch: Any, received: Any) -> Any:
            output = compute(micro_batch, received)
            for unit in self._units[run.stage.shared]:
                unit.cast_gradients()
            return output

        return computed

    def begin(self, shared: SharedParameters) -> None:
        """Before a step: gradients of earlier steps, which all replicas have, count once. Shards are on one rank."""
        self._clear(self._trained(shared))

    def add_up(self, worker: int, shared: SharedParameters) -> None:
        self._reduce(shared)
        self._sum(worker, self._trained(shared))

    def _trained(self, shared: SharedParameters) -> list[nn.Parameter]:
        """Return the parameters of a stage that are in no unit. Those in units are shards at this point."""
        return [parameter for parameter in shared.own_parameters() if parameter not in self._sharded]

    def _reduce(self, shared: SharedParameters) -> None:
        """Give the shards of a stage their gradients."""
        units = self._units[shared]
        if units and not self._is_alone:
            have_gradients = [unit.have_gradients() for unit in units]
            flags = torch.tensor([has for of_unit in have_gradients for has in of_unit], dtype=torch.uint8)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
            for unit, wanted in zip(
                units, flags.split([len(of_unit) for of_unit in have_gradients]), strict=True
            ):
                unit.complete_gradients(wanted.tolist())
        for unit in units:
            unit.cast_gradients()
        for unit in units:
            if unit.is_root:
                unit.reduce()
        for parameter in self._trained(shared):
            _lay_out(parameter)


@torch.no_grad()
def _lay_out(parameter: Any) -> None:
    """Add up partial gradients of a parameter that tensor parallelism shards, and lay them out as the parameter."""
    gradient = parameter.grad
    if is_dtensor(parameter) and gradient is not None and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
