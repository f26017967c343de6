"""Records that travel between rooms, masked reductions, metrics, tree helpers and errors."""
