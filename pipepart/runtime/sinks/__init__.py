"""Sinks receive the outputs of the last stage, and return the gradients from which backwards start."""

from .loss_sink import LossSink, Share, scalar_as_plain, scalar_from_plain
from .micro_batches import BeforeBackward, MicroBatchLossSink, check_forwards_first, make_loss_sink
from .mini_batch import BatchLossSink
from .outputs import OutputSink, loss_of_outputs

__all__ = [
    "BatchLossSink",
    "BeforeBackward",
    "LossSink",
    "MicroBatchLossSink",
    "OutputSink",
    "Share",
    "check_forwards_first",
    "loss_of_outputs",
    "make_loss_sink",
    "scalar_as_plain",
    "scalar_from_plain",
]
