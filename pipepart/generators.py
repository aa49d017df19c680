"""Locks of torch's global random generators, which all threads share."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

GENERATOR_LOCKS: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)
"""By the device of a generator. Who sets its state for a moment and puts it back holds the lock, and so does who copies
the state to put it back later: the copy must not be a state that another thread has set for a moment."""
