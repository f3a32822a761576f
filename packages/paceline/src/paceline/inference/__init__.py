"""Models that are larger than the device: placed by a plan, their weights brought in time from memory or from the disk."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

_WHERE = {
    "PlacedModel": "paceline.inference.execution",
    "Placement": "paceline.inference.placement",
    "Rates": "paceline.inference.workload",
    "Workload": "paceline.inference.workload",
    "available_memory": "paceline.inference.memory",
    "choose_placement": "paceline.inference.choose",
    "empty_weights": "paceline.inference.placing",
    "load": "paceline.inference.loading",
    "measure_rates": "paceline.inference.memory",
    "place": "paceline.inference.placing",
    "placement_facts": "paceline.inference.blocks",
    "placement_from_map": "paceline.inference.choose",
    "plan": "paceline.inference.loading",
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
    from paceline.inference.blocks import placement_facts
    from paceline.inference.choose import choose_placement, placement_from_map
    from paceline.inference.execution import PlacedModel
    from paceline.inference.loading import load, plan
    from paceline.inference.memory import available_memory, measure_rates
    from paceline.inference.placement import Placement
    from paceline.inference.placing import empty_weights, place
    from paceline.inference.workload import Rates, Workload
else:
    __getattr__ = lazy_names(__name__, _WHERE)
