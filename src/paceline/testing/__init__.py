"""Public tools with which users test their own loops."""

from paceline.testing.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
