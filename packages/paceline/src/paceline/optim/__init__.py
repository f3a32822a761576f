"""Optimizers, gradient scale, clipping, schedules. Optimizers of Paceline's own are public names, such as `Muon`."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

_WHERE = {
    "Lamb": "paceline_large.optim.lamb",
    "Lion": "paceline_large.optim.lion",
    "Muon": "paceline_large.optim.muon",
    "adamw8bit": "paceline_large.optim.eight_bit",
}

__all__ = ["Lamb", "Lion", "Muon", "adamw8bit"]

if TYPE_CHECKING:  # to type checkers a module with a `__getattr__` has every name, misspelt ones too
    from paceline_large.optim.eight_bit import adamw8bit
    from paceline_large.optim.lamb import Lamb
    from paceline_large.optim.lion import Lion
    from paceline_large.optim.muon import Muon
else:
    __getattr__ = lazy_names(__name__, _WHERE)
