"""Recording: the calls of a forward, their assignment to layers, and the layers that replay them."""
