"""Ranks that hold parts of the same sequences (`context`)."""
