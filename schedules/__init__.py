"""Pipeline schedules: what order, how long, how much memory, and what is the best there can be."""

from .action import Action, Kind, ScheduleError
from .bounds import bound
from .build import build, names
from .check import check
from .costs import StageCosts
from .data_parallel import data_parallel
from .early import early_gradients
from .idle import Idle
from .memory import held, in_flight
from .messages import insert_messages
from .passes import (
    fuse_backward,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    permute_devices,
    split_backward,
    split_overlaps,
)
from .schedule import Schedule, without_micro_batches
from .search import search
from .side_by_side import side_by_side
from .simulate import simulate
from .timeline import Timeline
from .transfer import Transfer
from .versions import live_versions, older_versions, stepped_together

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
    "data_parallel",
    "early_gradients",
    "fuse_backward",
    "held",
    "in_flight",
    "insert_messages",
    "insert_optimizer_step",
    "insert_recompute",
    "insert_reduce_grad",
    "live_versions",
    "names",
    "older_versions",
    "permute_devices",
    "search",
    "side_by_side",
    "simulate",
    "split_backward",
    "split_overlaps",
    "stepped_together",
    "without_micro_batches",
]
