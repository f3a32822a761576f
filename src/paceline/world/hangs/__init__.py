"""Ranks that wait: progress, debug mode, and the reports that say who waits where and for whom."""
