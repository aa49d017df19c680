"""Parameters and buffers that layers of several stages share, such as an embedding's weight and the head's.

::

    stage 0 (embedding)   the parameter ◀── gradient of micro-batch k ── replica   stage 2 (head)
                            └─▶ .grad: head's + embedding's, added by autograd as it does without stages

The first stage that uses a parameter has the user's own. Every later one has a replica: an alias on the same device, or
a copy that is kept equal on another. A replica's gradient is sent micro-batch by micro-batch to the previous stage that
uses the parameter. It enters the graph there at the node where that stage's own gradient arrives. So the sums are those
of plain micro-batched training, the last use first, and the user's parameter and its hooks see the whole gradient.

In a further replica of the model every stage has replicas of all its tensors, and gradients of shared parameters pass
from stage to stage in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...autograd.in_place import version
from ...capture import state_of
from ...input_error import InputError
from .shadow import Layers, ReplicaParam, Shadows, Values


class GradientRoute(NamedTuple):
    """How the gradient of one shared parameter passes a stage.

    Attributes:
        number: of the parameter, the same in all its stages.
        tensor: what the stage's layers use: the parameter, or a replica.
        previous: the stage before this that uses it, which gets the gradient; None for the first.
        following: the stage after this that uses it, which sends a gradient; None for the last.
    """

    number: int
    tensor: Tensor
    previous: int | None
    following: int | None


class SharedParameters:
    """The layers of one stage, with replicas of the tensors that it shares with others.

    Used by the caller between steps, and by the stage's worker at the end of a step.

    Args:
        originals: the user's layers.
        shadows: of them.
        users: the stages that use each tensor that several stages use.
        stage: the number of this one.

    Attributes:
        originals: the user's layers.
        layers: of the stage; layers that use replicas are replaced by shadows.
        values: the replicas, by the user's tensor.
    """

    def __init__(
        self, originals: Layers, shadows: Shadows, users: Mapping[Tensor, Sequence[int]], stage: int
    ) -> None:
        self.originals = originals
        self._shadows = shadows
        self._stage = stage
        self._users = users
        self.layers = shadows.layers
        self.values: Values = {}
        self._buffers = [
            (f"{path}.{key}", part, key, tensor)
            for name, layer in originals
            for path, part in layer.named_modules(prefix=name)
            for key, tensor in part._buffers.items()
            if tensor is not None and stage in users.get(tensor, ())
        ]
        # Each of these buffers in this step, with its version.
        self._present: list[tuple[Tensor | None, int]] = []

    def refresh(self) -> tuple[GradientRoute, ...]:
        """Take over the user's values and settings; return the routes of the shared parameters' gradients.

        Raises:
            ValueError: a layer has other modules than when the pipeline was made, or another buffer in place of one
                that has a replica.
        """
        self.values = self._shadows.refresh()
        self._present = []
        for name, part, key, tensor in self._buffers:
            present, replica = part._buffers.get(key), self.values.get(tensor)
            if replica is not None and present is not tensor:
                raise InputError(
                    f"buffer {name}, which stages on several devices share, was replaced after the pipeline was made, "
                    "as model.double() and model.to(dtype) do: change the model first, and then make the pipeline"
                )
            self._present.append((present, version(present if replica is None else replica)))
        return tuple(
            GradientRoute(number, self.values.get(tensor, tensor), *_neighbours(stages, self._stage))
            for number, (tensor, stages) in enumerate(self._users.items())
            if self._stage in stages and isinstance(tensor, nn.Parameter)
        )

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the user's parameters that train here, without replicas of those of other stages."""
        replicas = set(self.values.values())
        parameters = dict.fromkeys(parameter for _, layer in self.layers for parameter in layer.parameters())
        return [each for each in parameters if each.requires_grad and each not in replicas]

    def finish(self) -> None:
        """Copy attributes that shadows have set on themselves back to the layers.

        Raises:
            RuntimeError: a layer has written a shared buffer.
        """
        self._shadows.give_back()
        for (name, part, key, tensor), (present, before) in zip(self._buffers, self._present, strict=True):
            if part._buffers.get(key) is not present or version(self.values.get(tensor, present)) != before:
                raise RuntimeError(_written(name, self._users[tensor]))


def share_parameters(
    groups: Sequence[Layers],
    devices: Sequence[torch.device],
    names: Sequence[str] | None = None,
    local: Collection[int] | None = None,
    first: int = 0,
) -> list[SharedParameters]:
    """Return the layers of each stage, with replicas of what an earlier stage uses as well.

    The layers must be on their devices, and shared tensors on the device of the first stage that uses them.

    Args:
        groups: the layers of each stage.
        devices: where each stage runs.
        names: of the devices, if devices of different names share no memory; None if equal torch devices do.
        local: the stages that run in this process, None for all; the layers of others have no replicas.
        first: the number of the first stage in the schedule.
    """
    users = users_of(groups, first)
    runs = Counter(
        chain.from_iterable({part for _, layer in layers for part in layer.modules()} for layers in groups)
    )
    in_several = {module for module, stages in runs.items() if stages > 1}
    shared = []
    for stage, (layers, device) in enumerate(zip(groups, devices, strict=True), first):
        replicas = {}
        for tensor, (owner, *others) in users.items() if local is None or stage - first in local else ():
            apart = names is not None and names[owner - first] != names[stage - first]
            if stage in others and (apart or isinstance(tensor, nn.Parameter) or tensor.device != device):
                replicas[tensor] = ReplicaParam(tensor, device, apart)
        shared.append(
            SharedParameters(layers, Shadows(layers, replicas, in_several=in_several), users, stage)
        )
    return shared


def check_shared(groups: Sequence[Layers], asynchronous: bool) -> None:
    """Check that stages can share the tensors that they share.

    Raises:
        ValueError: they share a buffer that layers write, a tensor of a TorchScript module, or under an asynchronous
            schedule any parameter.
    """
    users = users_of(groups)
    parts = [
        module for layers in groups for name, layer in layers for module in layer.named_modules(prefix=name)
    ]
    for path, part in parts:
        for key, tensor in {**part._parameters, **part._buffers}.items():
            if tensor not in users:
                continue
            if asynchronous and isinstance(tensor, nn.Parameter):
                raise InputError(
                    f"parameter {f'{path}.{key}'!r} is shared by layers of stages {_listed(users[tensor])}, and under "
                    "an asynchronous schedule each stage changes its weights by itself: put these layers in one stage, "
                    "or choose a synchronous schedule, such as '1f1b'"
                )
            if isinstance(part, torch.jit.ScriptModule):
                raise InputError(
                    f"{path}.{key} is shared by layers of several stages, which a TorchScript module cannot do: "
                    "put them in one stage"
                )
            if key == "running_mean" and isinstance(part, nn.modules.batchnorm._NormBase):
                raise InputError(_written(f"{path}.{key}", users[tensor]))


def users_of(groups: Sequence[Layers], first: int = 0) -> dict[Tensor, list[int]]:
    """Return the stages that use a tensor, in order, for each that several use; ``first`` is the first's number."""
    users: dict[Tensor, list[int]] = {}
    for stage, layers in enumerate(groups, first):
        for tensor in dict.fromkeys(tensor for _, module in layers for tensor in state_of(module)):
            users.setdefault(tensor, []).append(stage)
    return {tensor: stages for tensor, stages in users.items() if len(stages) > 1}


def _neighbours(stages: Sequence[int], stage: int) -> tuple[int | None, int | None]:
    place = stages.index(stage)
    return stages[place - 1] if place else None, stages[place + 1] if place + 1 < len(stages) else None


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))


def _written(buffer: str, stages: Sequence[int]) -> str:
    return (
        f"buffer {buffer} is shared by layers of stages {_listed(stages)}, which write it at the same "
        "time: put them in one stage, or give each layer a buffer of its own"
    )
