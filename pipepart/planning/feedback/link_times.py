"""What the links of a cluster really take, from the messages of measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from ...cluster import Cluster, Link, PairLink
from ...units import format_seconds
from ..plan_document import Plan
from .measured_steps import Message, awaited_messages, checked_traces
from .refine import Traces

_FEWEST = 3
_NOTHING = 1e-12


def refine_cluster(plan: Plan, trace: Traces) -> tuple[Cluster, list[str]]:
    """The plan's cluster with the latencies that messages really had, and a text a link on what was found.

    Only messages count whose receiver was waiting when they were sent. A link keeps its latency where these are too
    few or take too unlike times, or where their bytes take most of the time: the bandwidth may be wrong as well then.

    Args:
        plan: that was run.
        trace: measured steps of it, one or several.

    Raises:
        ValueError: no trace, or one that is empty or of another schedule.
    """
    found = list(awaited_messages(plan, checked_traces(plan, trace)))
    if plan.cluster.emulated:
        return plan.cluster, ["links are left alone: they are emulated, and take what they are said to"]
    cluster, notes = plan.cluster, []
    used = {frozenset(message.between) for message in found}
    links: list[PairLink] = []
    for link in cluster.links:
        own = [message for message in found if set(message.between) == set(link.between)]
        latency, note = _latency(link, own)
        links.append(link.model_copy(update={"latency": latency}))
        notes.append(f"the link of {link.between[0]!r} and {link.between[1]!r} {note}")
        used.discard(frozenset(link.between))
    latency, note = _latency(cluster.link, [one for one in found if frozenset(one.between) in used])
    notes.append(f"the link of all {'other ' if links else ''}devices {note}")
    shared = cluster.link.model_copy(update={"latency": latency})
    return cluster.model_copy(update={"link": shared, "links": tuple(links)}), notes


def _latency(link: Link, messages: Sequence[Message]) -> tuple[float, str]:
    """The latency of a link, and what is to be said about it."""
    if len(messages) < _FEWEST:
        return link.latency, f"is left alone: {len(messages)} messages were waited for, it takes {_FEWEST}"
    moving = [message.bytes / link.bandwidth if link.bandwidth else 0.0 for message in messages]
    rests = [message.seconds - bytes_ for message, bytes_ in zip(messages, moving, strict=True)]
    latency = median(rests)
    first, _, third = quantiles(rests)
    if median(moving) > max(latency, 0.0) + _NOTHING:
        return (
            link.latency,
            "is left alone: the bytes take most of the time, so that its bandwidth may be wrong",
        )
    if (third - first) / 2 > latency / 2 + _NOTHING:
        return link.latency, (
            f"is left alone: messages take from {format_seconds(max(first, 0.0))} to {format_seconds(third)}"
        )
    latency = max(latency, 0.0)
    was, now = format_seconds(link.latency), format_seconds(latency)
    return latency, f"has a latency of {now} by {len(messages)} messages, and not {was}"
