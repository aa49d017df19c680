"""A recording as a value: its calls, how they are dealt out to layers, and the layers that replay them."""
