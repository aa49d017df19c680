"""Joint search: simulated annealing over cut, placement and order of actions, scored by the simulated step."""
