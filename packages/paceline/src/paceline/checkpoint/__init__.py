"""State, safely on disk: one format for every plan, and a crash at any moment leaves the last checkpoint whole."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

# torch's distributed checkpoint takes over a second to import: not before something is saved or loaded.
_WHERE = {
    "STORES": "paceline.checkpoint.store",
    "Checkpointer": "paceline.checkpoint.checkpointer",
    "Loaded": "paceline.checkpoint.checkpointer",
    "Manifest": "paceline.checkpoint.format.manifest",
    "RunState": "paceline.checkpoint.state.run_state",
    "Stateful": "paceline.checkpoint.state.run_state",
    "Store": "paceline.checkpoint.store",
    "TrainState": "paceline.checkpoint.state.train_state",
    "check_stateful": "paceline.checkpoint.state.train_state",
    "load_model": "paceline.checkpoint.weights.model",
    "load_object": "paceline.checkpoint.files",
    "parse_size": "paceline.checkpoint.weights.export",
    "save_model": "paceline.checkpoint.weights.model",
    "save_object": "paceline.checkpoint.files",
    "store_for": "paceline.checkpoint.store",
    "verify": "paceline.checkpoint.format.manifest",
}

__all__ = [
    "STORES",
    "Checkpointer",
    "Loaded",
    "Manifest",
    "RunState",
    "Stateful",
    "Store",
    "TrainState",
    "check_stateful",
    "load_model",
    "load_object",
    "parse_size",
    "save_model",
    "save_object",
    "store_for",
    "verify",
]

if TYPE_CHECKING:  # to type checkers a module with a `__getattr__` has every name, misspelt ones too
    from paceline.checkpoint.checkpointer import Checkpointer, Loaded
    from paceline.checkpoint.files import load_object, save_object
    from paceline.checkpoint.format.manifest import Manifest, verify
    from paceline.checkpoint.state.run_state import RunState, Stateful
    from paceline.checkpoint.state.train_state import TrainState, check_stateful
    from paceline.checkpoint.store import STORES, Store, store_for
    from paceline.checkpoint.weights.export import parse_size
    from paceline.checkpoint.weights.model import load_model, save_model
else:
    __getattr__ = lazy_names(__name__, _WHERE)
