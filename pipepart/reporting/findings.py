"""Writes at most three sentences about a plan: what limits its step, and what to change first."""

from __future__ import annotations

from dataclasses import replace

import schedules
from schedules import Kind, Timeline

from ..planning import Plan, refine
from ..planning.planner import shorter_steps
from ..runtime.observe.trace import Trace
from ..units import counted, format_seconds
from .plan_tables import stage_numbers
from .quantity import longer
from .steps import WORDS, action_seconds

_WORTH = 0.005  # a change that saves less of the step is none
_NOTICED = 0.02  # a part of the step that is worth a word


def findings(plan: Plan, trace: Trace | None = None) -> tuple[str, ...]:
    """Return at most three sentences: what limits the step, and the first thing to change.

    With a trace the first one compares the measured step with the prediction, and the others hold for the measured
    costs. Each figure is that of a plan with the change, simulated. A plan without a profile has none of them.

    Args:
        plan: any.
        trace: measured steps of it.

    Raises:
        ValueError: no step of the plan's number of micro-batches was traced.
    """
    sentences = []
    if trace is not None and trace.predicted is not None:
        sentences.append(_measured(plan, trace, trace.predicted))
    if plan.profile is None or plan.prediction is None or not plan.prediction.step_seconds:
        return tuple(sentences)
    slower = _slower_than_one_device(
        plan, plan.predicted.step_seconds if trace is None else trace.median.makespan
    )
    if trace is not None:
        steps = [step for step in trace.steps if step.schedule.micro_batches == plan.micro_batches]
        plan = plan.model_copy(update={"profile": refine(plan.profile, plan, steps)}).predict()
    sentences += [*slower, _limit(plan)]
    if len(plan.cluster) > 1:
        sentences.append(_change(plan, measured=trace is not None))
    return tuple(sentences[:3])


def _limit(plan: Plan) -> str:
    """Say what most of the step is lost to.

    ::

        step = mean work of a device + (work of the busiest - mean) + sums of gradients + messages + ramp
                                        ─────── imbalance ───────
    """
    timeline = plan.simulate()
    step, sums = timeline.makespan, [0.0] * timeline.schedule.devices
    for (stage, kind), seconds in action_seconds(timeline).items():
        if kind == Kind.REDUCE_GRAD:
            sums[timeline.schedule.device_of[stage]] += sum(seconds)
    work = [busy - reduction for busy, reduction in zip(timeline.busy, sums, strict=True)]
    row = max(range(len(work)), key=lambda device: work[device])
    device, mean, most = plan.workers[row].name, sum(work) / len(work), work[row]
    numbers = sorted({number % len(plan.stages) for number in timeline.schedule.stages_of(row)})
    if len(work) == 1:
        unused = len(plan.cluster) - 1
        rest = f"{counted(unused, 'other device')} {'is' if unused == 1 else 'are'} unused"
        return f"All stages are on {device}: {rest if unused else 'there is nothing to balance'}."
    without_messages = _with_free_messages(plan, timeline)
    parts = {
        "imbalance": most - mean,
        "sums": max(sums),
        "messages": step - without_messages,
        "ramp": without_messages - most - max(sums),
    }
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / step
    if share < _NOTICED:
        return f"The devices compute for {_part(mean / step)} of the step: little is lost."
    if name == "imbalance":
        verb = "is" if len(numbers) == 1 else "are"
        which = f"Stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers)}"
        return f"{which} on {device} {verb} the bottleneck, {_part(most / mean - 1)} over the mean of the devices."
    if name == "messages":
        return f"Messages between devices make the step {_part(step / without_messages - 1)} longer."
    if name == "sums":
        return f"Adding up the gradients of {plan.replicas} replicas takes {_part(share)} of the step."
    return f"The bubble is {_part(timeline.bubble)} of the step: devices wait while the pipeline fills and drains."


def _slower_than_one_device(plan: Plan, step: float) -> list[str]:
    """Say so if a step, predicted or measured, is no faster than the profile predicts it for one device."""
    one_device = plan.predicted.serial_seconds
    if one_device > step * (1 - _NOTICED):
        return []
    return [
        f"The pipeline gains nothing: a step of {format_seconds(step)}, against {format_seconds(one_device)} for the "
        "same micro-batches on one device without it."
    ]


def _with_free_messages(plan: Plan, timeline: Timeline) -> float:
    """Return the seconds of the step if messages took no time."""
    if not timeline.transfers:
        return timeline.makespan
    free = replace(plan.stage_costs(), latency=0.0, bandwidth=float("inf"), ports={})
    return schedules.simulate(timeline.schedule, free).makespan


def _change(plan: Plan, measured: bool) -> str:
    """Say which change of the request saves the most, or that none does."""
    step = plan.predicted.step_seconds
    changes = shorter_steps(plan, edited=measured or not plan.alternatives)
    saved = 1 - changes[0].step_seconds / step if changes else 0.0
    if saved >= _WORTH:
        best = changes[0]
        keywords = best.command_line
        text = f"Planning again{f' with `{keywords}`' if keywords else ''} would save {_part(saved)}"
        if len(best.plan.workers) > len(plan.workers):
            text += f", on {counted(len(best.plan.workers), 'device')}"
        if best.estimated:
            return f"{text}, if times are in proportion to the samples: profile that number."
        return f"{text}: replan with the trace." if measured else f"{text}."
    text = "No change of one keyword of the request gives a shorter step"
    if not plan.step_bound:
        return f"{text}."
    most = _part(1 - 1 / (1 + plan.step_gap))
    return f"{text}; no plan of as many micro-batches can save more than {most}."


def _measured(plan: Plan, trace: Trace, predicted: Timeline) -> str:
    """Compare the median step with the prediction, and name the actions that explain most of the difference."""
    median = trace.median
    how = longer(median.makespan / predicted.makespan, "as predicted")
    text = f"Measured {format_seconds(median.makespan)} a step, {how}"
    off = median.makespan - predicted.makespan
    if abs(off) < _NOTICED * predicted.makespan:
        return f"{text}."
    than = f"{text} than predicted" if how != "as predicted" else text
    measured, expected = (
        {key: sum(seconds) for key, seconds in action_seconds(step).items() if key[0] < len(plan.stages)}
        for step in (median, predicted)
    )
    key = max(measured, key=lambda key: (measured[key] - expected.get(key, 0.0)) * (1 if off > 0 else -1))
    late = sum(each.delay for each in median.idle) / len(median.idle)
    if off > 0 and late > max(measured[key] - expected.get(key, 0.0), _NOTICED * median.makespan):
        return f"{than}: actions start late, for {_part(late / median.makespan)} of the devices' time."
    if not expected.get(key) or abs(measured[key] - expected[key]) < abs(off) / 4:
        return f"{than}: no stage explains it alone."
    stage, kind = key
    return (
        f"{than}: each {WORDS.get(kind, kind.value)} of stage {stage} on {plan.stages[stage].device} takes "
        f"{measured[key] / expected[key]:.2f} times what was profiled."
    )


def _part(share: float) -> str:
    """Format a fraction as percent, with a decimal below 10 %."""
    return f"{share:.0%}" if round(abs(share), 3) >= 0.1 else f"{share:.1%}"
