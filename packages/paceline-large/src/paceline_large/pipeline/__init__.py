"""Ranks that hold one after the other of a model's blocks, through which micro-batches flow (`pipeline`)."""
