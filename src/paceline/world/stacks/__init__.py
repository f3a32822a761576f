"""Stacks of running processes: written by the processes themselves, read and grouped by whoever watches them."""
