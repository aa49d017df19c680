"""Partitions a layer graph over devices of several types, with a proof of optimality or a lower bound.

Public as ``pipepart.planning.cut``. The chain planner also uses :mod:`.device_orders` and :mod:`.intervals`. This file
imports nothing, because :mod:`.partition` imports scipy.
"""
