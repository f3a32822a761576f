"""Models that are larger than the device: placed by a plan, their weights brought in time from memory or from the disk."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

_WHERE = {
    "PlacedModel": "paceline_large.inference.execution",
    "Placement": "paceline_large.inference.placement",
    "Rates": "paceline_large.inference.workload",
    "Workload": "paceline_large.inference.workload",
    "available_memory": "paceline_large.inference.memory",
    "choose_placement": "paceline_large.inference.choose",
    "empty_weights": "paceline_large.inference.placing",
    "load": "paceline_large.inference.loading",
    "measure_rates": "paceline_large.inference.memory",
    "place": "paceline_large.inference.placing",
    "placement_facts": "paceline_large.inference.blocks",
    "placement_from_map": "paceline_large.inference.choose",
    "plan": "paceline_large.inference.loading",
}

__all__ = [
    "PlacedModel",
    "Placement",
    "Rates",
    "Workload",
    "available_memory",
    "choose_placement",
    "empty_weights",
    "load",
    "measure_rates",
    "place",
    "placement_facts",
    "placement_from_map",
    "plan",
]

if TYPE_CHECKING:  # to type checkers a module with a `__getattr__` has every name, misspelt ones too
    from paceline_large.inference.blocks import placement_facts
    from paceline_large.inference.choose import choose_placement, placement_from_map
    from paceline_large.inference.execution import PlacedModel
    from paceline_large.inference.loading import load, plan
    from paceline_large.inference.memory import available_memory, measure_rates
    from paceline_large.inference.placement import Placement
    from paceline_large.inference.placing import empty_weights, place
    from paceline_large.inference.workload import Rates, Workload
else:
    __getattr__ = lazy_names(__name__, _WHERE)
