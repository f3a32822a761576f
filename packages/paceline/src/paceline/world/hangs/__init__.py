"""Finds ranks that hang: the progress of each rank, debug mode, and reports of which rank waits where."""
