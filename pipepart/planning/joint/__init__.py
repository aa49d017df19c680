"""The joint search: cut, placement and order of the actions, changed together and judged by the simulated step."""
