"""Good cuts of a graph, without a proof."""
