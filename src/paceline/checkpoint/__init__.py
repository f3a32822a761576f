"""State, safely on disk: one format for every plan, and a crash at any moment leaves the last checkpoint whole."""

from paceline.checkpoint.checkpointer import Checkpointer, Loaded
from paceline.checkpoint.files import load_object, save_object
from paceline.checkpoint.manifest import Manifest, verify
from paceline.checkpoint.model import load_model, parse_size, save_model
from paceline.checkpoint.state import RunState, Stateful, TrainState, check_stateful
from paceline.checkpoint.store import STORES, Store, store_for

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
