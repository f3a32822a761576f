"""Stacks of running processes. Each process writes its own; the launcher, or a rank under torchrun, reads and groups them."""
