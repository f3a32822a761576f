"""Trackers of products; an entry point of `paceline.trackers` names each `TRACKER`."""
