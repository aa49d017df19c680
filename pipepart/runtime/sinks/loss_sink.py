"""LossSink: receives the outputs and losses of one run, and returns the gradients that backwards start from."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ...autograd import graph_cut
from ...autograd.own_copy import tensors
from ...loss import (
    Added,
    LossError,
    MicroBatchLoss,
    Reduction,
    without_slack,
)
from ...workers.streams import hold_for_caller


class Share(NamedTuple):
    """What one rank knows of the loss of a mini-batch.

    Attributes:
        added: losses that layers of its stages added.
        total: of the last stage's rank: the loss without them.
        correction: the factor for the gradients.
        certain: whether that is 1, whatever the outputs are.
        trains: whether a gradient of any loss has gone into the model.
        refusal: why the gradients of the mini-batch are not right, if they are not.
    """

    added: Mapping[tuple[int, int], list[tuple[Tensor, float, bool]]]
    total: Tensor | None = None
    correction: float = 1.0
    certain: bool = True
    trains: bool = False
    refusal: str = ""

    def as_plain(self) -> list[Any]:
        """Return it as values that JSON has."""
        added = [
            [key, [[scalar_as_plain(loss), *rest] for loss, *rest in losses]]
            for key, losses in self.added.items()
        ]
        total = None if self.total is None else scalar_as_plain(self.total)
        return [added, total, *self[2:]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Share:
        """Return what :meth:`as_plain` was given, on the host."""
        added, total, *rest = plain
        tensors = {
            (stage, micro_batch): [(scalar_from_plain(loss), weight, graph) for loss, weight, graph in losses]
            for (stage, micro_batch), losses in added
        }
        return cls(tensors, None if total is None else scalar_from_plain(total), *rest)


class LossSink(ABC):
    """Base of the sinks: the outputs and the auxiliary losses of one run, and the gradients that backwards start from.

    A sink is used by the workers during a run, and by the caller after it. Each worker writes the auxiliary losses of
    its own stages. A recomputed forward writes the same values again.

    Args:
        sizes: the samples in each micro-batch.
        groups: the micro-batches of each optimizer step, which form a mini-batch; None for one group of all.
        scaler: scales the gradients.
        keep_outputs: keep the outputs of the last stage, detached.
        loss_weight: multiplies the gradients.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
        receiving: held while an output is received: replicas have several last stages, on several workers.
        outputs: of the micro-batches, without a graph, where they are kept.
        added_have_graph: whether any auxiliary loss can be differentiated.
    """

    can_wait = False

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[range] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        keep_outputs: bool = False,
        loss_weight: float = 1.0,
    ) -> None:
        self.receiving = threading.Lock()
        self.outputs: list[Any] = [None] * len(sizes)
        self.added_have_graph = False
        self._sizes = sizes
        self._groups = groups or [range(len(sizes))]
        self._scaler = scaler
        self._weight = loss_weight
        self._keeps = keep_outputs
        self._trains = False
        self._known: Share | None = None
        self._seeds: dict[float, Tensor] = {}  # by weight, on the CPU
        self._added: dict[tuple[int, int], list[tuple[Tensor, float, bool]]] = {}

    @abstractmethod
    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Receive the output of one micro-batch; return the roots: tensors where its gradients enter the graph."""

    @abstractmethod
    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients for those roots."""

    def correction(self) -> float:
        """Return the factor for the gradients of the run, after all micro-batches were received."""
        return 1.0

    @property
    def certain(self) -> bool:
        """Whether the factor is 1, whatever the outputs are."""
        return self._known is None or self._known.certain

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Receive the auxiliary losses of a stage's layers, on that stage's worker; return their roots."""
        self._added[stage, micro_batch] = [
            (
                without_slack(loss.detach()),
                1.0 if reduction is Reduction.SUM else self._share_of(micro_batch),
                loss.requires_grad,
            )
            for loss, reduction in losses
        ]
        roots = tuple(root for loss, _ in losses for root in graph_cut.roots(loss))
        self.added_have_graph |= bool(roots)
        return roots

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients for those roots."""
        return [
            self._added_seed(weight, loss)
            for loss, weight, has_graph in self._added[stage, micro_batch]
            if has_graph
        ]

    def added_total(self) -> Tensor | None:
        """Return the sum of the auxiliary losses, each with its weight; None if there are none."""
        weighed = [(loss, weight) for key in sorted(self._added) for loss, weight, _ in self._added[key]]
        if not weighed:
            return None
        hold_for_caller(loss for loss, _ in weighed)
        total = weighed[0][0] * weighed[0][1]
        for loss, weight in weighed[1:]:
            total = total + (loss * weight).to(total.device)
        return total

    def taken(self) -> dict[int, MicroBatchLoss]:
        """Return the losses of the micro-batches that were received here, for the ranks of other replicas."""
        return {}

    def adopt_taken(self, taken: Mapping[int, MicroBatchLoss]) -> None:
        """Take over the losses of micro-batches that other ranks received.

        Raises:
            LossError: they were computed in another way.
        """
        assert not taken

    def share(self, is_last: bool) -> Share:
        """Return what this rank knows of the loss, if the stages are on several; the last stage's knows most."""
        if not is_last:
            return Share(self._added, trains=self.trains)
        try:
            return Share(self._added, self._own_total(), self.correction(), self.certain, self.trains)
        except LossError as error:
            return Share(self._added, refusal=str(error))

    def adopt(self, shares: Sequence[Share], last: int) -> None:
        """Take over what the other ranks know; ``last`` is the rank of the last stage."""
        for share in shares:
            self._added = {**share.added, **self._added}  # this rank's own stay on their devices
            self._trains |= share.trains
            self.added_have_graph |= any(graph for row in share.added.values() for *_, graph in row)
        self._known = shares[last]

    @property
    def trains(self) -> bool:
        """Whether a gradient of any loss has gone into the model."""
        return self._trains or self.added_have_graph

    def _share_of(self, micro_batch: int) -> float:
        """Return the part of the samples of its mini-batch that a micro-batch has."""
        group = next(group for group in self._groups if micro_batch in group)
        return self._sizes[micro_batch] / sum(self._sizes[group.start : group.stop])

    def _keep(self, micro_batch: int, value: Any) -> None:
        self.outputs[micro_batch] = pytree.tree_map_only(Tensor, Tensor.detach, value)

    def _added_seed(self, weight: float, loss: Tensor) -> Tensor | None:
        return self._seed(weight, loss)

    def _seed(self, weight: float | Tensor, like: Tensor) -> Tensor:
        """Return a weight as a gradient of ``like``, scaled."""
        if isinstance(weight, Tensor):
            return self._scaled(weight.to(like.device, like.dtype))
        if not like.is_cpu:  # workers would share one, and their streams have no order
            return self._scaled(torch.full((), weight, dtype=like.dtype, device=like.device))
        seed = self._seeds.get(weight)
        # A backward may have written into it.
        if seed is None or seed.dtype is not like.dtype or seed._version:
            seed = self._seeds[weight] = self._scaled(torch.full((), weight, dtype=like.dtype, device="cpu"))
        return seed

    def _scaled(self, seed: Tensor) -> Tensor:
        seed = seed if self._weight == 1.0 else seed * self._weight
        return self._scaler.scale(seed).to(seed.dtype) if self._scaler else seed

    def _own_total(self) -> Tensor | None:
        """Return the loss without the auxiliary losses; None if this sink computes none."""
        return self._known and self._known.total

    def _with_added(self, parts: int = 1) -> Tensor:
        """Return the loss plus the auxiliary losses of as many mini-batches, a mean over these."""
        total = self._own_total()
        assert total is not None
        added = self.added_total()
        return total if added is None else total + added.to(total.device, total.dtype) / parts


def on_device_of(output: Any, target: Any) -> Any:
    """Return the target on the device of the first tensor of the output."""
    are_tensors = type(output) is type(target) is Tensor
    if are_tensors and target.device == output.device and graph_cut.emulated.bring is None:
        return target
    leaves = () if target is None else tensors(output)
    return graph_cut.move(target, leaves[0].device) if leaves else target


def scalar_as_plain(scalar: Tensor) -> tuple[float, str]:
    """Return the value and the type of a tensor without dimensions."""
    return scalar.item(), str(scalar.dtype).removeprefix("torch.")


def scalar_from_plain(plain: tuple[float, str]) -> Tensor:
    """Return the tensor that :func:`scalar_as_plain` was given, on the host."""
    value, dtype = plain
    return torch.tensor(value, dtype=getattr(torch, dtype), device="cpu")
