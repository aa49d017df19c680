"""Overlap of streams or threads, computed from the spans of a profile."""

import torch

from benchmarks.overlap import Overlap, overlap, profiled


def test_lanes_that_overlap_are_together_for_as_long_as_they_do():
    found = overlap([("a", 0.0, 10.0), ("b", 6.0, 14.0), ("b", 20.0, 21.0)])
    assert found == Overlap(busy=15.0, together=4.0, copying=0.0, hidden=0.0, lanes=2)


def test_spans_within_spans_of_their_own_lane_are_one():
    assert overlap([]) == Overlap(0.0, 0.0, 0.0, 0.0, 0)
    assert overlap([("a", 0.0, 10.0), ("a", 2.0, 5.0)]) == Overlap(10.0, 0.0, 0.0, 0.0, 1)


def test_copies_are_hidden_while_something_computes():
    found = overlap([("a", 2.0, 6.0)], [("c", 0.0, 3.0), ("d", 5.0, 9.0)])
    assert (found.busy, found.copying, found.hidden) == (4.0, 7.0, 2.0)


def test_the_profiler_sees_the_operations_of_a_step():
    found = profiled(lambda: torch.ones(8) + 1, on_cuda=False)
    assert found.lanes == 1
    assert found.busy > 0
