"""Constructs a pipeline on several ranks: an error or a difference on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from torch import nn

from ..capture import Chain
from ..input_error import InputError
from ..planning import Plan
from ..ranks import Ranks, join_ranks
from .mini_batches import digest
from .wrapped import refuse_wrapped

_PLAIN = bool | int | float | str | tuple | type(None)


@contextmanager
def making(
    ranks: Ranks | None, plan: Plan, model: nn.Module | Chain, options: Mapping[str, Any]
) -> Iterator[None]:
    """Context manager around the construction of a pipeline: an error or a difference on one rank raises on all.

    ``options`` are the arguments of the pipeline besides plan and model, by name.

    Raises:
        RankError: it fails on another rank.
        InputError: the ranks have different plans, models or options.
    """
    arguments: list[str] = []
    with _failing_together(ranks):
        if isinstance(model, nn.Module | Chain):
            module = model if isinstance(model, nn.Module) else model.model
            refuse_wrapped(module)
            if ranks is not None and isinstance(plan, Plan):
                digest_of_plan = digest(plan.model_dump_json(exclude={"alternatives", "profile"}))
                arguments = [f"the plan is {digest_of_plan[:8]}", *_options(options), *_layers(module)]
        yield  # refuses other types
    if ranks is not None and arguments:
        try:
            _check_alike(ranks, arguments)
        except BaseException:
            ranks.close("the pipeline could not be made")
            raise


def planned_once(check: Callable[[], object], make: Callable[[], Plan], options: Mapping[str, Any]) -> Plan:
    """Plan on rank 0 and return the plan on every rank; with one process, just plan.

    Args:
        check: refuses, on every rank, what cannot be planned for.
        make: makes the plan.
        options: of the plan, by name.

    Raises:
        Exception: what ``check`` or ``make`` raises, on the rank where it does; a RankError on the others.
        InputError: the ranks have different options.
    """
    ranks = join_ranks()
    with _failing_together(ranks):
        check()
        if ranks is None:
            return make()
        _check_alike(ranks, _options(options))
        text = ranks.gather(make().model_dump_json() if ranks.rank == 0 else None)[0]
        ranks.close("the plan is made")
        return Plan.model_validate_json(text)


@contextmanager
def _failing_together(ranks: Ranks | None) -> Iterator[None]:
    """If the block raises on one rank, tell the others."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.tell(error)
            ranks.close("the pipeline could not be made")
        raise


def _check_alike(ranks: Ranks, arguments: Sequence[str]) -> None:
    """Raise an InputError on all ranks if they have not equal descriptions of their arguments. All ranks call this."""
    digests = ranks.exchange(digest(arguments), patient=True)
    if rank := next((rank for rank, other in enumerate(digests) if other != digests[0]), 0):
        everyone = ranks.gather(arguments)
        pairs = zip_longest(everyone[0], everyone[rank], fillvalue="nothing else")
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise InputError(
            f"{other} on rank {rank}, and {first} on rank 0: pass the same model and arguments on all ranks. Make a "
            "plan on one rank and read it on all (plan.save, Plan.load), or use Pipeline.auto, which does so"
        )


def _options(options: Mapping[str, Any]) -> list[str]:
    return [f"{name} is {_described(value)}" for name, value in options.items()]


def _layers(model: nn.Module) -> list[str]:
    """Describe the modules, parameters and buffers of a model."""
    layers = [
        f"{f'layer {name!r}' if name else 'the model'} is {_described(module)}"
        for name, module in model.named_modules()
    ]
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        shape = "uninitialized" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
        layers.append(f"{name!r} is {str(tensor.dtype).removeprefix('torch.')} {shape}")
    return layers


def _described(value: Any) -> str:
    """Return what a value is, without its address in memory and without what may depend on the rank."""
    if isinstance(value, _PLAIN | dict | list):
        return repr(value)
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}({value.extra_repr()})"
    return getattr(value, "__qualname__", type(value).__qualname__)
