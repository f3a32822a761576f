"""State, safely on disk: one format for every plan, and a crash at any moment leaves the last checkpoint whole."""

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

__all__ = sorted(_WHERE)

__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _WHERE.items()})
