"""Where checkpoints lie: the disks of this machine, shared file systems, and what serves a URL.

A store is one file here with `STORE = Class()` at its end, or an entry point `paceline.stores` of another distribution.
"""

from paceline.checkpoint.store.store import STORES, Store, confined, discard, store_for

__all__ = ["STORES", "Store", "confined", "discard", "store_for"]
