"""Messages between devices: their order, the connections for them, and proof that no order of them deadlocks."""
