"""Refuses plans, options and parallelized layers that a pipeline cannot run, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...capture import Group
from ...dtensors import is_dtensor, mesh_names
from ...input_error import InputError, InputTypeError
from ...planning import Plan
from ...profiling import Parallelize
from ...runtime.state.shared_parameters import SharedParameters
from .units import Unit, units_of

Layers = Mapping[str, nn.Module]
Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters


def check_parallelize_given(
    parallelize: Parallelize | None, tensor: int, shard: bool, devices: int, under_torchrun: bool
) -> None:
    """Check the function that parallelizes layers against the plan, or the wanted plan, and the processes.

    Raises:
        TypeError: it is no function.
        ValueError: the plan needs it and there is none; or there is one process only.
    """
    if parallelize is None:
        if tensor > 1 or shard:
            wanted = f"tensor={tensor}" if tensor > 1 else "shard=True"
            raise InputError(
                f"{wanted} needs the function that parallelizes the layers of a stage: pass parallelize=f to the "
                f"Pipeline, or plan without {wanted}"
            )
        return
    if not callable(parallelize):
        raise InputTypeError(f"parallelize must be a function of layers and a mesh, got {parallelize!r:.80}")
    if not under_torchrun:
        raise InputError(
            "parallelize= shares layers out among processes, and this is one: start "
            f"torchrun --nproc-per-node {devices}"
        )


def check_parallelize(
    parallelize: Parallelize | None, plan: Plan, under_torchrun: bool, options: Mapping[str, Any]
) -> None:
    """Check as :func:`check_parallelize_given`, and that neither the plan nor the pipeline's options exclude it."""
    check_parallelize_given(parallelize, plan.tensor, plan.shard, len(plan.cluster), under_torchrun)
    if parallelize is None:
        return
    if plan.asynchronous:
        raise InputError(
            f"schedule {plan.schedule!r} is asynchronous, and keeps several versions of the weights, which "
            "parallelize= does not allow: plan with a synchronous schedule, such as '1f1b'"
        )
    if any(stage.mode == "offload" for stage in plan.stages):
        raise InputError(
            "the plan keeps the stash of a stage on the host, which it cannot do of layers under parallelize=: plan "
            "with offload='never'"
        )
    instead = {
        "optimizer": "make the optimizer of pipe.parameters(), and step it after pipe.step",
        "compile": "compile modules within your function, module.compile()",
        "strict": "leave it out",
    }
    for name, how in instead.items():
        if options.get(name):
            raise InputError(f"{name}= cannot be combined with parallelize=: {how}")


class LayersBefore:
    """The modules and parameters of the layers of a rank before they are parallelized.

    Args:
        layers: by name.
        foreign: parameters that several ranks use, with the ranks.
    """

    def __init__(self, layers: Layers, foreign: Mapping[Tensor, Sequence[int]]) -> None:
        self._layers, self._foreign = layers, foreign
        self._modules = {name: dict(layer.named_modules()) for name, layer in layers.items()}
        self._places = _places(layers.values())

    def checked_units(
        self, stages: Sequence[SharedParameters], mesh: DeviceMesh
    ) -> dict[SharedParameters, list[Unit]]:
        """Check that what was done to the layers can run in a pipeline; return the FSDP units of each stage."""
        _check_modules(self._layers, self._modules)
        _check_parameters(self._layers, self._places, self._foreign)
        for shared in stages:
            _check_shadows(shared, self._places)
        return {shared: units_of(shared.originals, mesh) for shared in stages}


def _places(layers: Any) -> dict[Tensor, list[Place]]:
    """Return the modules that have each parameter, with its name there."""
    places: dict[Tensor, list[Place]] = {}
    for module in dict.fromkeys(part for layer in layers for part in layer.modules()):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, key))
    return places


def _check_modules(layers: Layers, before: Mapping[str, Mapping[str, nn.Module]]) -> None:
    """Check that the function has changed modules in place, and wrapped none."""
    for name, layer in layers.items():
        for path, module in layer.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise InputError(
                    f"parallelize has put a part of layer {name!r} under DistributedDataParallel: the pipeline adds up "
                    "the gradients over mesh['dp'] by itself"
                )
            if path in before[name] and before[name][path] is not module:
                raise InputError(
                    f"parallelize has replaced module {path!r} of layer {name!r} by a {type(module).__name__}, and "
                    "optimizers and the recording hold the one before: change modules in place, as fully_shard and "
                    "parallelize_module do"
                )


def _check_parameters(
    layers: Layers, before: Mapping[Tensor, Sequence[Place]], foreign: Mapping[Tensor, Sequence[int]]
) -> None:
    """Check that tied parameters are still one, and that no hook is lost."""
    names = {
        module: f"{name}.{path}".rstrip(".")
        for name, layer in layers.items()
        for path, module in layer.named_modules()
    }
    for parameter, places in before.items():
        now = [module._parameters.get(key) for module, key in places]
        (module, key), *others = places
        what = f"parameter '{names[module]}.{key}'"
        if any(other_now is not now[0] for other_now in now):
            other, at = others[0]
            raise InputError(
                f"{what} is tied to '{names[other]}.{at}', and parallelize has made two parameters of it: shard both "
                "modules by one call of fully_shard on a module that has both, or leave the parameter out "
                "(fully_shard(..., ignored_params={parameter}))"
            )
        if now[0] is parameter:
            continue
        if parameter in foreign:
            raise InputError(
                f"{what} is used by stages on ranks {', '.join(map(str, foreign[parameter]))}, and a parameter of "
                "several stages cannot be sharded: leave it out (fully_shard(..., ignored_params={parameter})), or put "
                "these layers into one stage (pipepart.plan(..., colocate=...))"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"{what} has a hook, which is lost when the parameter is sharded: use the gradient after the step"
            )


def _check_shadows(shared: SharedParameters, before: Mapping[Tensor, object]) -> None:
    """Check that layers are unchanged of which the stage has copies, as they use a parameter of an earlier stage."""
    for (name, original), (_, used) in zip(shared.originals, shared.layers, strict=True):
        if used is not original and any(parameter not in before for parameter in original.parameters()):
            raise InputError(
                f"layer {name!r} uses a parameter of an earlier stage, and parallelize has sharded others of it: leave "
                "this layer out, or put both layers into one stage (pipepart.plan(..., colocate=...))"
            )


def check_functions(model: nn.Module, groups: Mapping[str, Group], units: Iterable[Unit]) -> None:
    """Check that no function of a recorded model, beside its modules, takes a sharded parameter.

    Args:
        groups: what each layer of this rank calls, by its name.
        units: of FSDP, of this rank.
    """
    gathered = {parameter for unit in units if not unit.reshards for parameter in unit.parameters}
    for name, group in groups.items():
        for path in group.tensors:
            owner, _, key = path.rpartition(".")
            tensor = getattr(model.get_submodule(owner), key)
            if is_dtensor(tensor) and (tensor not in gathered or "tp" in mesh_names(tensor)):
                raise InputError(
                    f"layer {name!r} uses parameter {path!r} in a function, not in a module that parallelize has "
                    "changed, and gets a shard of it: leave the parameter as it is, or use it in a module of its own"
                )
