"""Pipeline schedules: generators, validation, simulation of time and memory, search and lower bounds."""

from .analysis.timeline import Timeline
from .analysis.waits import Idle
from .analysis.write_trace import side_by_side
from .by_name import build, names
from .core.action import Action, Kind, ScheduleError
from .core.costs import StageCosts
from .core.schedule import Schedule, without_micro_batches
from .core.transfer import Transfer
from .core.versions import live_versions, older_versions, stepped_together
from .messages import connection_rounds, message_order
from .searching.bounds import bound
from .searching.search import search
from .simulation.moments import memory_during
from .simulation.simulate import simulate
from .transforms.passes import (
    fuse_backward,
    insert_offload,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    split_backward,
    split_overlaps,
)
from .transforms.replicate import replicate
from .validation.check import check

__all__ = [
    "Action",
    "Idle",
    "Kind",
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
    "insert_offload",
    "insert_optimizer_step",
    "insert_recompute",
    "insert_reduce_grad",
    "live_versions",
    "memory_during",
    "message_order",
    "names",
    "older_versions",
    "replicate",
    "search",
    "side_by_side",
    "simulate",
    "split_backward",
    "split_overlaps",
    "stepped_together",
    "without_micro_batches",
]
