"""``pipepart.check``: trains a model plainly and as pipelines, and compares losses, gradients and state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..capture import LayerInfo, chain_of, restored
from ..cluster import Cluster, as_cluster
from ..data.arguments import Arguments, check_arguments
from ..data.recorded import entered
from ..data.split import Splitter, micro_batches_of
from ..pipeline import Pipeline
from ..planning import Plan, warn_of_changes
from ..planning.compression import without_compression
from ..planning.costs.stage_memory import Recompute
from ..profiling.progress import progress_bar
from ..ranks import under_torchrun
from ..relative_errors import tensor_errors
from .copies import own_dtype
from .even_plan import even_plan, require, require_known
from .first_difference import LayerRecorder, find_first_difference
from .numbers import Numbers, errors, first_different_step
from .plain import PlainSteps, Reference, make_reference
from .report import MINI_BATCH, CheckReport, CheckRow, PlainFacts
from .training import Case, Optimizer, Reductions, Training

SCHEDULES = ("gpipe", "1f1b", "zb-h1")

# The largest relative error that sums in another order may cause; that of a lost micro-batch is far larger.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
# Where messages between stages are compressed.
_COMPRESSED = {"bf16": 5e-2, "int8": 2e-1}


def check(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    layers: Sequence[str] | None = None,
    devices: int | Sequence[torch.device | str] | Cluster | None = None,
    schedules: Sequence[str] = SCHEDULES,
    micro_batches: int | None = None,
    steps: int = 3,
    dtypes: Sequence[str] = ("float64", "own"),
    optimizer: Optimizer = "sgd",
    recompute: Sequence[Recompute] = ("never",),
    reduction: Reductions | None = None,
    split: Splitter | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    strict: bool = False,
    tolerance: float | None = None,
) -> CheckReport:
    """Train copies of ``model`` plainly and as pipelines, and compare losses, gradients, parameters and buffers.

    Each training has the same start, mini-batch and random draws. Each step of a pipeline starts from the plain model's
    parameters and buffers. The plain model is the user's, called as the user calls it; nothing that a pipeline has
    recorded takes part. It runs on the same micro-batches one after the other, and a pipeline must have its numbers;
    it is compared with one loss over the whole mini-batch, too. If a pipeline differs, both run one step again, to
    find the first module that differs. The model, its gradients and all random states stay as they are.

    Copies of a loss module are called; a loss function is called itself, with copies of what it uses of the model.

    Args:
        model: any module, trained in the mode that it is in.
        sample: a mini-batch, its tensors ``[samples, ...]``, as for :func:`pipepart.profile`; the same in every step.
        target, loss_fn, reduction, split: as for :class:`pipepart.Pipeline`.
        layers: paths of the modules that become layers, as for :func:`pipepart.profile`. Not with ``plan``.
        devices: as for :meth:`pipepart.Pipeline.auto`. Each stage gets as many layers, whatever they cost. None for 2;
            under torchrun for one a process, all of which call this.
        schedules: the schedules to try.
        micro_batches: number of micro-batches; by default two for each device. At most one for each sample.
        steps: number of steps to train.
        dtypes: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``, to which the copies are cast, or
            ``"own"`` for the model as it is.
        optimizer: ``"sgd"`` (with momentum) or ``"adam"``.
        recompute: modes to try each schedule with.
        plan: a plan to try instead, with its own cut, devices, schedule, micro-batches and recompute. If it compresses
            messages, it is compared without that first; then with it, where numbers may differ by 5 % under ``"bf16"``
            and by 20 % under ``"int8"``.
        seed: seed of the first step; each step has the next one.
        strict: as for :class:`pipepart.Pipeline`.
        tolerance: the largest relative error that counts as rounding, in every dtype. None for 1e-9 in float64, 1e-4
            in float32, and 5e-2 in bfloat16 and float16. It holds for the loss of the whole mini-batch too, whose
            sums have another order.

    Raises:
        TypeError, CaptureError: the model cannot be recorded or copied.
        ValueError: an unknown name, a number out of range, a model on the meta device, or a schedule that needs more
            stages than there are layers.
        Exception: whatever a layer, the loss or the pipeline raises.
    """
    arguments = Arguments.of(sample)
    check_arguments(*chain_of(model).entrance, arguments, target)
    value = arguments.input
    samples = sum(micro_batches_of(value, target, 1, split).sizes)
    require(steps >= 1, f"steps must be at least 1, got {steps}")
    require(
        tolerance is None or 0 <= tolerance < float("inf"),
        f"tolerance must be a relative error of at least 0, as 1e-6, got {tolerance}",
    )
    require_known("optimizer", optimizer, get_args(Optimizer))
    require(
        not any(tensor.is_meta for tensor in model.parameters()),
        "the model is on the meta device, and check trains it as a whole: construct a smaller one plainly to check, or "
        "check pipe.module after the pipeline was made",
    )
    labels = _labels(dtypes, own_dtype(model, value))
    infos: Sequence[LayerInfo] = ()
    if plan is None:
        chain = chain_of(model, layers=layers, split_loss=loss_fn is None)
        cluster = as_cluster((Cluster.of_ranks() if under_torchrun() else 2) if devices is None else devices)
        count = 2 * len(cluster) if micro_batches is None else micro_batches
        require(count >= 1, f"micro_batches must be at least 1, got {count}")
        require(len(schedules) > 0, "no schedule is named: there is nothing to compare")
        for mode in recompute:
            require_known("recompute", mode, get_args(Recompute))
        count = min(count, samples)
        if not chain.layers:
            batch = micro_batches_of(value, target, count, split)
            entered(chain, batch._replace(inputs=batch.inputs[:1]))
        names = [name for name, _ in chain.layers]
        tried = itertools.product(dict.fromkeys(schedules), dict.fromkeys(recompute))
        plans = [even_plan(names, cluster, schedule, count, mode) for schedule, mode in tried]
    else:
        require(layers is None, "layers=... and plan=... are given: a plan has its layers")
        infos = plan.profile.layers if plan.profile is not None else ()
        warn_of_changes(plan, chain_of(model, infos))
        # Copies in another dtype are no changes of the model.
        given_plan = plan.model_copy(update={"profile": None})
        plans = [given_plan.model_copy(update={"cluster": without_compression(plan.cluster)})]
        plans += [given_plan] if plan.compressed else []
    home, parts = torch.device(plans[0].workers[0].torch_device or "cpu"), plans[0].micro_batches
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
            layers,
            infos,
        )
        for label, dtype in labels.items()
    }
    first = next(iter(cases.values()))
    rows, facts = _compared(cases, plans, tolerance)
    return CheckReport(
        model=type(model).__name__,
        devices=tuple(device.name for device in plans[0].workers),
        samples=samples,
        micro_batches=first.parts,
        steps=steps,
        optimizer=optimizer,
        seed=seed,
        rows=tuple(rows),
        plain=tuple(facts),
    )


def _compared(
    cases: Mapping[str, Case], plans: Sequence[Plan], tolerance: float | None
) -> tuple[list[CheckRow], list[PlainFacts]]:
    """Train along each plan in each dtype; return a row for each, and facts about the plain model in each dtype."""
    first = next(iter(cases.values()))
    rows: list[CheckRow] = []
    facts: list[PlainFacts] = []
    runs = len(cases) * (len(plans) + 1)
    with (
        restored(first.model),
        _threads(plans[0].workers[0].threads),
        torch.enable_grad(),
        progress_bar(None, f"checking {type(first.model).__name__}", after=1.0) as done,
    ):
        for tried in plans:
            with _pipeline(Training(first), tried):
                pass  # what is impossible is refused before anything is trained
        for label, case in cases.items():
            allowed = _rounding_of(label) if tolerance is None else tolerance
            with _named(label, case):
                reference = make_reference(case, label, allowed)
            facts.append(reference.facts)
            for tried in plans:
                done((len(rows) + len(facts)) / runs)
                with _named(label, case, tried.schedule):
                    rows.append(_row(case, label, tried, reference, allowed))
    return rows, facts


def _rounding_of(label: str) -> float:
    """Return the relative error that counts as rounding in a dtype, or in the least exact of several."""
    return max(_TOLERANCES.get(part, 1e-4) for part in label.split(", "))


def _row(case: Case, label: str, plan: Plan, reference: Reference, allowed: float) -> CheckRow:
    numbers = _train(Training(case), plan, reference)
    differences = errors(numbers, reference.numbers)
    modes = {stage.recompute for stage in plan.stages}
    compressed = [_COMPRESSED[dtype] for dtype in plan.cluster.compressed.values()]
    row = CheckRow(
        schedule=plan.schedule,
        recompute=modes.pop() if len(modes) == 1 else "mixed",
        stages=len(plan.stages),
        dtype=label,
        losses=differences["losses"] or 0.0,
        gradients=differences["gradients"],
        parameters=differences["parameters"],
        buffers=differences["buffers"],
        mini_batch=reference.mini_batch,
        tolerance=max([allowed, *compressed]),
        compressed=plan.compressed,
    )
    if row.ok:
        return row
    kinds = (row.losses, row.gradients, row.parameters, row.buffers)
    if all(error is None or error <= row.tolerance for error in kinds):
        return row.model_copy(update={"layer": "loss", "what": MINI_BATCH})
    if under_torchrun():
        return row.model_copy(update=_first_of_all_processes(numbers, reference))
    return row.model_copy(update=_first_difference(case, plan, row, numbers, reference))


def _train(
    training: Training,
    plan: Plan,
    reference: Reference,
    steps: int | None = None,
    recorder: LayerRecorder | None = None,
) -> list[Numbers]:
    """Train as a pipeline, each step from where the plain model was."""
    with _pipeline(training, plan) as pipe:
        return training.run(
            lambda _, x, y: pipe.step(Arguments.of_input(x), target=y),
            steps,
            recorder=recorder,
            follow=reference.numbers,
            own={name for name, _ in pipe.named_parameters()} if under_torchrun() else None,
        )


def _first_of_all_processes(numbers: list[Numbers], reference: Reference) -> dict[str, str]:
    """The fields of a row that name the first tensor that differs, where no process has all layers."""
    differences = (
        (step, kind, name)
        for step, (mine, other) in enumerate(zip(numbers, reference.numbers, strict=True))
        for kind in mine
        for name, error in tensor_errors(mine[kind], other[kind]).items()
        if error
    )
    step, kind, name = next(differences, (0, "losses", ""))
    return {"layer": name.rpartition(".")[0] or "loss", "what": f"the first of its {kind}, step {step}"}


def _first_difference(
    case: Case, plan: Plan, row: CheckRow, numbers: list[Numbers], reference: Reference
) -> dict[str, Any]:
    """The fields of a row that say which module is the first to differ.

    Both sides train once more, up to the first step that differs, and record their modules in it.
    """
    step = first_different_step(numbers, reference.numbers, row.tolerance)
    plain, training = Training(case), Training(case)
    plain_recorder, recorder = LayerRecorder(plain.chain.places), LayerRecorder(training.chain.places)
    theirs = plain.run(PlainSteps(case), step + 1, recorder=plain_recorder)[-1]
    ours = _train(training, plan, reference, step + 1, recorder)[-1]
    difference = find_first_difference((ours, recorder), (theirs, plain_recorder), row.tolerance)
    repeats = not any(errors([theirs], [reference.numbers[step]]).values())
    return {**difference._asdict(), "what": f"{difference.what}, step {step}", "repeats": repeats}


def _pipeline(training: Training, plan: Plan) -> Pipeline:
    case = training.case
    return Pipeline(
        training.chain, plan, training.loss_fn, reduction=case.reduction, split=case.split, strict=case.strict
    )


def _labels(dtypes: Sequence[str], own_dtype: str) -> dict[str, torch.dtype | None]:
    """For each dtype its name in the report, and what to cast to."""
    labels: dict[str, torch.dtype | None] = {}
    for name in dtypes:
        require_known("dtype", name, ("own", *_TOLERANCES))
        labels.setdefault(
            own_dtype if name == "own" else name, None if name in ("own", own_dtype) else getattr(torch, name)
        )
    require(len(labels) > 0, "no dtype is named: there is nothing to compare")
    return labels


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use as many intra-operation threads here as the workers do: another number sums in another order."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _named(label: str, case: Case, schedule: str | None = None) -> Iterator[None]:
    """Note on an exception which training raised it: a layer may not support the dtype of the check."""
    try:
        yield
    except Exception as error:
        who = f"schedule {schedule!r}" if schedule else "the plain model"
        hint = "" if case.dtype is None else "; where a layer cannot do this dtype, check dtypes=['own']"
        error.add_note(f"pipepart: in a check of {who} in {label}{hint}")
        raise
