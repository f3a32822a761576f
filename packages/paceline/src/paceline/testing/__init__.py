"""Public tools with which users test their own loops."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

_WHERE = {
    "Fault": "paceline_lens.faults",
    "InjectedFault": "paceline_lens.faults",
    "RankFailed": "paceline.testing.ranks",
    "arm": "paceline_lens.faults",
    "damage": "paceline_lens.faults",
    "layouts": "paceline.testing.all_worlds",
    "run_ranks": "paceline.testing.ranks",
    "worlds": "paceline.testing.all_worlds",
}

__all__ = ["Fault", "InjectedFault", "RankFailed", "arm", "damage", "layouts", "run_ranks", "worlds"]

if TYPE_CHECKING:  # to type checkers a module with a `__getattr__` has every name, misspelt ones too
    from paceline.testing.all_worlds import layouts, worlds
    from paceline.testing.ranks import RankFailed, run_ranks
    from paceline_lens.faults import Fault, InjectedFault, arm, damage
else:
    __getattr__ = lazy_names(__name__, _WHERE)
