"""Lower bounds on the bottleneck of any cut of a graph."""
