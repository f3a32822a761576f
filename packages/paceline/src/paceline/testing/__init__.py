"""Public tools with which users test their own loops."""

from paceline.testing.faults import Fault, InjectedFault, arm, damage
from paceline.testing.ranks import RankFailed, run_ranks
from paceline.testing.worlds import layouts, worlds

__all__ = ["Fault", "InjectedFault", "RankFailed", "arm", "damage", "layouts", "run_ranks", "worlds"]
