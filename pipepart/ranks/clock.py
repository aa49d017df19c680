"""Estimates the offset of this rank's clock from the clock of rank 0."""

import time

import torch
import torch.distributed as dist

_ROUNDS = 8


def offset_to_rank_0(rank: int, size: int, group: dist.ProcessGroup) -> float:
    """Return the seconds to add to this rank's ``time.perf_counter`` to get rank 0's. All ranks of the group call this.

    Each rank asks rank 0 for the time, as NTP does (RFC 5905), and takes the answer of the shortest round trip: the
    error is at most half of that.
    """
    moment = torch.empty(1, dtype=torch.float64)
    if rank == 0:
        for _ in range((size - 1) * _ROUNDS):
            asking = dist.recv(moment, group=group)
            dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), asking, group=group)
        return 0.0
    answers = []
    for _ in range(_ROUNDS):
        sent = time.perf_counter()
        dist.send(moment, 0, group=group)
        dist.recv(moment, 0, group=group)
        back = time.perf_counter()
        answers.append((back - sent, float(moment) - (sent + back) / 2))
    return min(answers)[1]
