"""``pipepart.check``: trains a model plainly and as pipelines, and compares all numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..capture import flatten, restored
from ..cluster import Cluster, as_cluster
from ..data.arguments import Arguments, check_arguments
from ..data.split import Splitter, micro_batches_of
from ..pipeline import Pipeline
from ..planning import Plan
from ..planning.stage_plan import Recompute
from .copies import own_dtype
from .culprit import Culprit, Part, find_culprit
from .facts import Reference, first_apart, mini_batch_error, refer, watched_plain
from .numbers import Numbers, errors
from .plans import even_plan, forwards
from .reasons import why_different, why_other_loss
from .report import CheckReport, CheckRow
from .training import Case, Optimizer, Training
from .watch import Watch

SCHEDULES = ("gpipe", "1f1b", "zb-h1")

# What sums in another order may make of a number that is right; a lost micro-batch is off by far more.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}


def check(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    devices: int | Sequence[torch.device | str] | Cluster = 2,
    schedules: Sequence[str] = SCHEDULES,
    micro_batches: int | None = None,
    steps: int = 3,
    dtypes: Sequence[str] = ("float64", "own"),
    optimizer: Optimizer = "sgd",
    recompute: Sequence[Recompute] = ("never",),
    reduction: Literal["mean", "sum"] | None = None,
    split: Splitter | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    strict: bool = False,
) -> CheckReport:
    """Trains copies of ``model`` plainly and as pipelines, and compares losses, gradients, parameters and buffers.

    Each training has the same start, mini-batch and random draws, and each step of a pipeline starts from the plain
    model's state. A pipeline is compared with the plain model run on
    the same micro-batches one after the other, bit for bit, and with one loss over the whole mini-batch, up to
    rounding. Where it differs, a step of both is run once more to find the layer that differs first. The model,
    its gradients and all random states stay as they were.

    Args:
        model: an ``nn.Sequential``, trained in the mode that it is in.
        sample: a mini-batch, its tensors ``[samples, ...]``, as for :func:`pipepart.profile`; every step has the same.
        target, loss_fn, reduction, split: as for :class:`pipepart.Pipeline`.
        devices: as for :meth:`pipepart.Pipeline.auto`; the layers are shared out evenly, not by their costs.
        schedules: those to try.
        micro_batches: parts of the mini-batch; two a device by default.
        steps: how many to train.
        dtypes: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``, to which the copies are cast, or
            ``"own"`` for the model as it is.
        optimizer: ``"sgd"`` (with momentum) or ``"adam"``.
        recompute: modes to try each schedule with.
        plan: to try this plan instead: cut, devices, schedule, micro-batches and recompute are its own.
        seed: of the first step; each step has the next.
        strict: as for :class:`pipepart.Pipeline`; what virtual devices refuse is raised.

    Raises:
        TypeError: the model is no ``nn.Sequential``, or it cannot be copied.
        ValueError: a name or number that is none, or a schedule that wants more stages than there are layers.
        Exception: whatever a layer or the loss raises.
    """
    given = Arguments.of(sample)
    check_arguments(*flatten(model)[0], given, target)
    value = given.input
    samples = sum(micro_batches_of(value, target, 1, split).sizes)
    _require(steps >= 1, f"steps must be at least 1, got {steps}")
    _require_known("optimizer", optimizer, get_args(Optimizer))
    labels = _labels(dtypes, own_dtype(model, value))
    plans = (
        [plan] if plan is not None else _plans(model, devices, schedules, micro_batches, recompute, samples)
    )
    home = torch.device(plans[0].workers[0].torch_device or "cpu")
    parts = plans[0].micro_batches
    cases = {
        label: Case(
            model,
            value,
            target,
            loss_fn,
            dtype,
            home,
            parts,
            steps,
            optimizer,
            seed,
            reduction,
            split,
            strict,
        )
        for label, dtype in labels.items()
    }
    rows, plain = [], []
    with restored(model), _threads(plans[0].workers[0].threads), torch.enable_grad():
        for tried in plans:
            with _pipeline(next(iter(cases.values())).start(), tried):
                pass  # what is impossible is refused before anything is trained
        for label, case in cases.items():
            with _named(label, case):
                reference = refer(case, label, max(_TOLERANCES.get(part, 1e-4) for part in label.split(", ")))
            plain.append(reference.facts)
            for tried in plans:
                with _named(label, case, tried.schedule):
                    rows.append(_row(case, label, tried, reference))
    return CheckReport(
        model=type(model).__name__,
        devices=tuple(device.name for device in plans[0].workers),
        samples=samples,
        micro_batches=next(iter(cases.values())).parts,
        steps=steps,
        optimizer=optimizer,
        seed=seed,
        rows=tuple(rows),
        plain=tuple(plain),
    )


def _row(case: Case, label: str, plan: Plan, reference: Reference) -> CheckRow:
    training = case.start()
    with _pipeline(training, plan) as pipe:
        numbers = training.run(
            lambda x, y: pipe.step(Arguments.of_input(x), target=y), follow=reference.micro_batched
        )
    found = errors(numbers, reference.micro_batched)
    modes = {stage.recompute for stage in plan.stages}
    row = CheckRow(
        schedule=plan.schedule,
        recompute=modes.pop() if len(modes) == 1 else "mixed",
        stages=len(plan.stages),
        dtype=label,
        losses=found["losses"] or 0.0,
        gradients=found["gradients"],
        parameters=found["parameters"],
        buffers=found["buffers"],
        mini_batch=mini_batch_error(numbers, reference.mini_batch),
        tolerance=reference.tolerance,
    )
    if row.same and row.ok:
        return row
    return row.model_copy(update=_first_difference(case, plan, row, numbers, reference))


def _first_difference(
    case: Case, plan: Plan, row: CheckRow, numbers: list[Numbers], reference: Reference
) -> dict[str, str]:
    """Which layer is the first to differ, and why."""
    kinds = (row.losses, row.gradients, row.parameters, row.buffers)
    alike = all(error is None or error <= row.tolerance for error in kinds)
    if alike and not row.ok:
        last, module = flatten(case.model)[-1]
        own = case.loss_fn is None
        return {
            "layer": last if own else "loss",
            "kind": type(module).__name__ if own else "",
            "what": "the loss of the mini-batch",
            "why": why_other_loss(case.loss_fn, case.reduction),
        }
    allowed = 0.0 if alike else row.tolerance
    step = first_apart(numbers, reference.micro_batched, allowed) or 0
    culprit = _culprit(case, plan, step, allowed, reference) or Culprit("", "", Part.LOSS)
    why = why_different(culprit, plan, case.parts, case.model, reference.facts)
    return {
        "layer": culprit.layer or "loss",
        "kind": culprit.kind,
        "what": f"{culprit.what}, step {step}",
        "why": why,
    }


def _culprit(case: Case, plan: Plan, step: int, allowed: float, reference: Reference) -> Culprit | None:
    """From one more run of both up to this step, with their layers watched."""
    plain_numbers, plain_watch, _ = watched_plain(case, step)
    training = case.start()
    with _pipeline(training, plan) as pipe:
        watch = Watch(training.layers, forwards(plan, case.parts))
        numbers = training.run(
            lambda x, y: pipe.step(Arguments.of_input(x), target=y),
            step + 1,
            watched=watch,
            follow=reference.micro_batched,
        )
    return find_culprit(training.layers, (numbers[-1], watch), (plain_numbers, plain_watch), allowed)


def _pipeline(training: Training, plan: Plan) -> Pipeline:
    case = training.case
    return Pipeline(
        training.model, plan, training.loss_fn, reduction=case.reduction, split=case.split, strict=case.strict
    )


def _plans(
    model: nn.Module,
    devices: int | Sequence[torch.device | str] | Cluster,
    schedules: Sequence[str],
    micro_batches: int | None,
    recompute: Sequence[Recompute],
    samples: int,
) -> list[Plan]:
    cluster = as_cluster(devices)
    count = 2 * len(cluster) if micro_batches is None else micro_batches
    _require(count >= 1, f"micro_batches must be at least 1, got {count}")
    _require(len(schedules) > 0, "no schedule is named: there is nothing to compare")
    for mode in recompute:
        _require_known("recompute", mode, get_args(Recompute))
    names = [name for name, _ in flatten(model)]
    return [
        even_plan(names, cluster, schedule, min(count, samples), mode)
        for schedule in dict.fromkeys(schedules)
        for mode in dict.fromkeys(recompute)
    ]


def _labels(dtypes: Sequence[str], own: str) -> dict[str, torch.dtype | None]:
    """What to call each dtype, and what to cast to."""
    found: dict[str, torch.dtype | None] = {}
    for name in dtypes:
        _require_known("dtype", name, ("own", *_TOLERANCES))
        found.setdefault(
            own if name == "own" else name, None if name in ("own", own) else getattr(torch, name)
        )
    _require(len(found) > 0, "no dtype is named: there is nothing to compare")
    return found


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _require_known(what: str, name: str, known: Sequence[str]) -> None:
    _require(name in known, f"{what} {name!r}: choose among {', '.join(known)}")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """As many intra-operation threads here as the workers have: with others, sums are made in another order."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _named(label: str, case: Case, schedule: str | None = None) -> Iterator[None]:
    """Says of a failure where the check was, for it may be the check's dtype that a layer cannot do."""
    try:
        yield
    except Exception as error:
        who = f"schedule {schedule!r}" if schedule else "the plain model"
        hint = "" if case.dtype is None else "; where a layer cannot do this dtype, check dtypes=['own']"
        error.add_note(f"pipepart: in a check of {who} in {label}{hint}")
        raise
