"""Calls the user's function that parallelizes the layers of a rank, and refuses what cannot run in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...input_error import InputError, InputTypeError
from ...planning import Plan
from ...runtime.state.shared_parameters import SharedParameters
from .borders import wait_at_borders
from .units import Unit, units_of

Parallelize = Callable[[Mapping[str, nn.Module], DeviceMesh], object]
Layers = Mapping[str, nn.Module]
Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters


def check_parallelize(
    parallelize: Parallelize | None, plan: Plan, under_torchrun: bool, options: Mapping[str, Any]
) -> None:
    """Check that the layers of a plan's stages can be parallelized.

    Args:
        parallelize: the user's function; None if there is none.
        plan: has the devices, and the number of processes of each.
        under_torchrun: whether this process is one of several.
        options: of the pipeline, by name.

    Raises:
        TypeError: it is no function.
        ValueError: the plan, or an option, cannot be combined with it; or the plan needs it.
    """
    if parallelize is None:
        if plan.tensor > 1 or plan.shard:
            wanted = f"tensor={plan.tensor}" if plan.tensor > 1 else "shard=True"
            raise InputError(
                f"the plan was made with {wanted}: pass the function that parallelizes the layers of a stage, "
                "Pipeline(..., parallelize=f), or plan without it"
            )
        return
    if not callable(parallelize):
        raise InputTypeError(f"parallelize must be a function of layers and a mesh, got {parallelize!r:.80}")
    count = len(plan.cluster)
    if not under_torchrun:
        raise InputError(
            f"parallelize= shares layers out among processes, and this is one: start torchrun --nproc-per-node {count}"
        )
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
        "deferred_batch_norm": "leave it out",
    }
    for name, how in instead.items():
        if options.get(name):
            raise InputError(f"{name}= cannot be combined with parallelize=: {how}")


def parallelize_layers(
    parallelize: Parallelize,
    layers: Layers,
    mesh: DeviceMesh,
    stages: Sequence[SharedParameters],
    foreign: Mapping[Tensor, Sequence[int]],
) -> dict[SharedParameters, list[Unit]]:
    """Call the function of the user for the layers of a rank; return the FSDP units of each of its stages.

    Args:
        parallelize: the function.
        layers: by name, in order.
        mesh: of the ranks that run these layers.
        stages: of this rank.
        foreign: parameters that several ranks use, with the ranks.

    Raises:
        ValueError: what it has done cannot run in a pipeline.
        Exception: what it raises.
    """
    before = _places(layers.values())
    modules = {name: dict(layer.named_modules()) for name, layer in layers.items()}
    parallelize(MappingProxyType(dict(layers)), mesh)
    _check_modules(layers, modules)
    _check_parameters(layers, before, foreign)
    for shared in stages:
        _check_shadows(shared, before)
        if "tp" in (mesh.mesh_dim_names or ()):
            wait_at_borders(shared.layers[0][1], shared.layers[-1][1])
    units = {shared: units_of(shared.originals, mesh) for shared in stages}
    _check_own(units)
    return units


def _places(layers: Any) -> dict[Tensor, list[Place]]:
    """Return the modules that have each parameter, with its name there."""
    found: dict[Tensor, list[Place]] = {}
    for module in dict.fromkeys(part for layer in layers for part in layer.modules()):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, key))
    return found


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
        if any(one is not now[0] for one in now):
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
    for (name, own), (_, used) in zip(shared.originals, shared.layers, strict=True):
        if used is not own and any(one not in before for one in own.parameters()):
            raise InputError(
                f"layer {name!r} uses a parameter of an earlier stage, and parallelize has sharded others of it: leave "
                "this layer out, or put both layers into one stage (pipepart.plan(..., colocate=...))"
            )


def _check_own(units: Mapping[SharedParameters, Sequence[Unit]]) -> None:
    """Check that no unit has modules of two stages."""
    seen: dict[Any, SharedParameters] = {}
    for shared, own in units.items():
        for unit in own:
            if seen.setdefault(unit.state, shared) is not shared:
                raise InputError(
                    "parallelize has sharded layers of two stages by one call of fully_shard, and each stage runs and "
                    "adds up its gradients by itself: call fully_shard for each layer"
                )
