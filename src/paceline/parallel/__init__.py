"""One file a strategy, applied in a chain."""
