"""Saves that are killed."""

from killed_saves import kill_at  # noqa: F401  (fixture)
