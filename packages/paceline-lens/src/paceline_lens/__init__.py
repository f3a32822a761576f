"""Looks at runs: the live page, metrics, `verify`, `tune`, and trackers of products."""
