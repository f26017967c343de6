"""Records that travel between rooms, masked reductions, metrics and tree helpers."""
