"""Pipeline schedules: generators, validation, simulation of time and memory, search and lower bounds."""

from .analysis.compare_traces import side_by_side
from .analysis.idle import Idle
from .analysis.timeline import Timeline
from .by_name import build, names
from .communication.connections import connection_rounds
from .communication.insert_messages import insert_messages
from .communication.lowering import message_order
from .core.action import Action, Kind, ScheduleError
from .core.costs import StageCosts
from .core.message import Message
from .core.schedule import Schedule, without_micro_batches
from .core.transfer import Transfer
from .core.versions import live_versions, older_versions, stepped_together
from .searching.bounds import bound
from .searching.search import search
from .searching.split_critical import split_critical
from .simulation.memory import in_flight, peak_candidates
from .simulation.moments import memory_during
from .simulation.simulate import simulate
from .transforms.passes import (
    fuse_backward,
    insert_offload,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    permute_devices,
    split_backward,
    split_overlaps,
)
from .transforms.replicate import replicate
from .validation.check import check

__all__ = [
    "Action",
    "Idle",
    "Kind",
    "Message",
    "Schedule",
    "ScheduleError",
    "StageCosts",
    "Timeline",
    "Transfer",
    "bound",
    "build",
    "check",
    "connection_rounds",
    "fuse_backward",
    "in_flight",
    "insert_messages",
    "insert_offload",
    "insert_optimizer_step",
    "insert_recompute",
    "insert_reduce_grad",
    "live_versions",
    "memory_during",
    "message_order",
    "names",
    "older_versions",
    "peak_candidates",
    "permute_devices",
    "replicate",
    "search",
    "side_by_side",
    "simulate",
    "split_backward",
    "split_critical",
    "split_overlaps",
    "stepped_together",
    "without_micro_batches",
]
