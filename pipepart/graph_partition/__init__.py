"""Partitions any layer graph over devices of several types, with a proof of optimality or a lower bound.

Public as ``pipepart.planning.cut``. The planner of chains shares :mod:`.device_orders` and :mod:`.intervals`. Nothing
is imported here, as :mod:`.partition` needs scipy.
"""
