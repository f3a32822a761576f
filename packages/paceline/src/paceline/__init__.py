"""Paceline runs the PyTorch training loop that you already have on any number of devices.

Public names are loaded when they are first used: `import paceline` does no work and does not import torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

# pip refuses an older Python. A copy of the repository on PYTHONPATH would fail later, with a SyntaxError.
if sys.version_info < (3, 11):  # noqa: UP036
    raise ImportError(
        f"Paceline needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable}). "
        "Make an environment with a newer one: `python3.11 -m venv .venv`"
    )

from paceline.base.lazy import lazy_names
from paceline.base.version import VERSION as __version__

_WHERE = {
    "Accelerator": "paceline.accelerator",
    "Keep": "paceline.checkpoint.keep",
    "LocalSGD": "paceline_large.optim.local_sgd",
    "PackedDocuments": "paceline_large.documents.packing",
    "Plan": "paceline.plan.plan",
    "TokenBatchSampler": "paceline_large.documents.tokens",
    "World": "paceline.world.world",
    "debug_launcher": "paceline.launch.notebook",
    "find_executable_batch_size": "paceline_large.optim.batch_size",
    "get_logger": "paceline.observe.logs",
    "notebook_launcher": "paceline.launch.notebook",
    "pack_documents": "paceline_large.documents.packing",
    "set_seed": "paceline.data.seed",
    "skip_first_batches": "paceline.data.skip",
    # the exception tree
    "ArgumentError": "paceline.base.errors",
    "CheckpointError": "paceline.base.errors",
    "CollectiveError": "paceline.base.errors",
    "CompatError": "paceline.base.errors",
    "ConfigError": "paceline.base.errors",
    "DataError": "paceline.base.errors",
    "LaunchError": "paceline.base.errors",
    "PacelineError": "paceline.base.errors",
    "PlanError": "paceline.base.errors",
    "PrepareError": "paceline.base.errors",
    "TrackerError": "paceline.base.errors",
    "TrainError": "paceline.base.errors",
    "WorldError": "paceline.base.errors",
}

__all__ = [
    "Accelerator",
    "ArgumentError",
    "CheckpointError",
    "CollectiveError",
    "CompatError",
    "ConfigError",
    "DataError",
    "Keep",
    "LaunchError",
    "LocalSGD",
    "PacelineError",
    "PackedDocuments",
    "Plan",
    "PlanError",
    "PrepareError",
    "TokenBatchSampler",
    "TrackerError",
    "TrainError",
    "World",
    "WorldError",
    "__version__",
    "debug_launcher",
    "find_executable_batch_size",
    "get_logger",
    "notebook_launcher",
    "pack_documents",
    "set_seed",
    "skip_first_batches",
]

if TYPE_CHECKING:  # what type checkers see: to them a module with a `__getattr__` has every name, misspelt ones too
    from paceline.accelerator import Accelerator
    from paceline.base.errors import (
        ArgumentError,
        CheckpointError,
        CollectiveError,
        CompatError,
        ConfigError,
        DataError,
        LaunchError,
        PacelineError,
        PlanError,
        PrepareError,
        TrackerError,
        TrainError,
        WorldError,
    )
    from paceline.checkpoint.keep import Keep
    from paceline.data.seed import set_seed
    from paceline.data.skip import skip_first_batches
    from paceline.launch.notebook import debug_launcher, notebook_launcher
    from paceline.observe.logs import get_logger
    from paceline.plan.plan import Plan
    from paceline.world.world import World
    from paceline_large.documents.packing import PackedDocuments, pack_documents
    from paceline_large.documents.tokens import TokenBatchSampler
    from paceline_large.optim.batch_size import find_executable_batch_size
    from paceline_large.optim.local_sgd import LocalSGD
else:
    __getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
