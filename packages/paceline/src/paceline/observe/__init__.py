"""Trackers, logs and profiles."""
