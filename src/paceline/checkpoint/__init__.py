"""State, safely on disk: one format for every plan, and a crash at any moment leaves the last checkpoint whole."""

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names

# torch's distributed checkpoint takes over a second to import: not before something is saved or loaded.
_WHERE = {
    "STORES": "store",
    "Checkpointer": "checkpointer",
    "Loaded": "checkpointer",
    "Manifest": "manifest",
    "RunState": "state",
    "Stateful": "state",
    "Store": "store",
    "TrainState": "state",
    "check_stateful": "state",
    "load_model": "model",
    "load_object": "files",
    "parse_size": "export",
    "save_model": "model",
    "save_object": "files",
    "store_for": "store",
    "verify": "manifest",
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
    from paceline.checkpoint.export import parse_size
    from paceline.checkpoint.files import load_object, save_object
    from paceline.checkpoint.manifest import Manifest, verify
    from paceline.checkpoint.model import load_model, save_model
    from paceline.checkpoint.state import RunState, Stateful, TrainState, check_stateful
    from paceline.checkpoint.store import STORES, Store, store_for
else:
    __getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _WHERE.items()})
