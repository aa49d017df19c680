"""RankPart: the parameters and the state of the stages of one rank, under the names of the whole model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..dtensors import local, local_leaf, mesh_names, shard_place, sharded_like, whole
from ..ranks import Ranks
from ..runtime.sinks import scalar_as_plain, scalar_from_plain
from .broadcast import broadcast_result, broadcast_tensors
from .model_part import ModelPart, StandIn
from .ownership import Ownership


class RankPart(ModelPart):
    """The parameters and state of one rank. All ranks call the methods that need the whole model.

    Args:
        meet: as :meth:`CallSync.meet`.
    """

    def __init__(
        self,
        model: nn.Module,
        ownership: Ownership,
        ranks: Ranks,
        meet: Callable[[str, Callable[[], Any]], Any],
    ) -> None:
        super().__init__(model)
        self._meet = meet
        self._ownership = ownership
        self._ranks = ranks
        self._replicas: dist.ProcessGroup | None = None
        self._stand_in = StandIn(torch.zeros(1))

    def connect(self, replicas: dist.ProcessGroup) -> None:
        """Copy the values of the first replica to the ranks with this part in other replicas."""
        self._replicas = replicas
        self._copy_first()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if self._ownership.is_mine(parameter):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, and a stand-in if it trains none of them."""
        here = [parameter for _, parameter in self.named_parameters()]
        yield from here
        if not any(parameter.requires_grad for parameter in here):
            yield self._stand_in

    def zero_grad(self, set_to_none: bool) -> None:
        super().zero_grad(set_to_none)
        self._stand_in.grad = None

    def gradients_to_unscale(self) -> list[Tensor]:
        """Return the gradients of this rank; that of the stand-in is made, as a ``GradScaler`` looks for one."""
        if self._stand_in in set(self.parameters()):
            self._stand_in.grad = torch.zeros_like(self._stand_in)
        return [local(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]

    def share_overflow(self, gradients: Sequence[Tensor]) -> None:
        """Write an infinity into the gradients of this rank if those of another rank are not finite.

        So every ``GradScaler`` skips the same steps. All ranks call this.
        """
        finite: defaultdict[torch.device, list[Tensor]] = defaultdict(list)  # one synchronization a device
        for gradient in gradients:
            finite[gradient.device].append(gradient.isfinite().all())
        overflow = not all(bool(torch.stack(of_device).all()) for of_device in finite.values())
        if any(self._ranks.exchange(overflow)) and gradients and not overflow:
            gradients[0].view(-1)[:1] = float("inf")

    def state_dict(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {name: state[name] for name in self._ownership.names(self.model)}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model (of the first replica) on every rank, in host memory."""
        self._meet("full_state_dict", lambda: None)
        copied = self._ranks.run(self._copied_state)  # in which the ranks of one stage exchange shards
        gathered: dict[str, Any] = {}
        for rank in self._ownership.ranks[0]:
            gathered |= broadcast_result(self._ranks, rank, lambda: copied)
        return {name: gathered[name] for name in self.model.state_dict() if name in gathered}

    def _copied_state(self) -> dict[str, Any]:
        return {
            name: whole(value.detach()).to("cpu", copy=True).resolve_conj().resolve_neg()
            if isinstance(value, Tensor)
            else value
            for name, value in self.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> Any:
        """Load the part of this rank from a state dict of the whole model; with replicas, that given to the first."""
        outcome = self._meet(f"load_state_dict(strict={strict})", lambda: self._load(state, strict))
        self._copy_first()
        return outcome

    def _load(self, state: Mapping[str, Any], strict: bool) -> Any:
        full = self.model.state_dict()
        missing = [name for name in full if name not in state]
        unknown = [name for name in state if name not in full]
        if strict and (missing or unknown):
            return self.model.load_state_dict(state, strict=True)  # raises, with torch's own words
        wanted = set(self._ownership.names(self.model)) | self._ownership.used_here(self.model)
        part: Any = OrderedDict(
            (name, sharded_like(value, full[name]) if isinstance(value, Tensor) else value)
            for name, value in state.items()
            if name in wanted
        )
        part._metadata = getattr(state, "_metadata", None)  # versions of the modules
        self.model.load_state_dict(part, strict=False)
        return nn.modules.module._IncompatibleKeys(missing, unknown)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        """Clip the gradients of this rank by the norm over all ranks; return the norm, equal to that of one process."""

        def own() -> dict[Any, Any]:
            float(max_norm)
            # Of one gradient each: the sum over all of them is then taken in the order of the model's parameters.
            norms: dict[tuple[torch.device, torch.dtype], dict[tuple[str, tuple[int, ...]], Tensor]] = {}
            for name, parameter in self.named_parameters():
                if parameter.grad is not None and (shard := local(parameter.grad)).numel():
                    norm = nn.utils.get_total_norm([shard], norm_type, foreach=foreach)
                    place = name, shard_place(parameter.grad)
                    norms.setdefault((norm.device, norm.dtype), {})[place] = norm
            return {  # one wait for each device, not one for each parameter
                place: scalar_as_plain(norm)
                for alike in norms.values()
                for place, norm in zip(alike, torch.stack(list(alike.values())).cpu(), strict=True)
            }

        norms = self._meet(f"clip_grad_norm_({max_norm}, {norm_type}, {error_if_nonfinite})", own)
        known: dict[str, dict[tuple[int, ...], Tensor]] = {}  # of each parameter, the norms of its shards
        for (name, place), norm in (pair for part in self._ranks.gather(norms) for pair in part.items()):
            known.setdefault(name, {})[place] = scalar_from_plain(norm)
        ordered = [
            shards[()] if () in shards else _joined([shards[place] for place in sorted(shards)], norm_type)
            for name, _ in self.model.named_parameters()
            if (shards := known.get(name))
        ]
        total = _joined(ordered, norm_type) if ordered else torch.tensor(0.0)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of all gradients is not finite, so they cannot be clipped; pass "
                "error_if_nonfinite=False to scale them anyway"
            )
        nn.utils.clip_grads_with_norm_(
            [local_leaf(parameter) for _, parameter in self.named_parameters()], max_norm, total, foreach
        )
        return total

    def share_tied(self) -> None:
        """Copy tied parameters from the rank that owns them to the other ranks that use them."""
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor, ranks in self._ownership.shared.items():
            alike.setdefault(tuple(ranks), []).append(tensor)
        for ranks, tensors in alike.items():
            broadcast_tensors(self._ranks, tensors, ranks[0])  # of all lanes

    def share_written(self) -> None:
        """Copy buffers of layers that train, such as BatchNorm statistics, from the first replica to all."""
        if self._replicas is not None:
            training = [
                buffer
                for module in self.model.modules()
                if module.training
                for buffer in module.buffers(False)
            ]
            written = [local(buffer) for buffer in dict.fromkeys(training) if self._ownership.is_mine(buffer)]
            broadcast_tensors(self._ranks, written, self._source(), self._replicas)

    def _source(self) -> int:
        assert self._replicas is not None
        return dist.get_process_group_ranks(self._replicas)[0]

    def _copy_first(self) -> None:
        """Give further replicas all parameters and buffers of the first, but those that are sharded over replicas."""
        if self._replicas is not None:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            mine = [
                local(tensor)
                for tensor in tensors
                if self._ownership.is_mine(tensor) and "dp" not in mesh_names(tensor)
            ]
            broadcast_tensors(self._ranks, mine, self._source(), self._replicas)


def _joined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the norms of parts."""
    return torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
