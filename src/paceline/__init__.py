"""Paceline runs the PyTorch training loop that you already have on any number of devices.

Public names are loaded when they are first used: `import paceline` does no work and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.base.lazy import lazy_names
from paceline.base.version import VERSION as __version__

_WHERE = {
    "Accelerator": "paceline.accelerator",
    "Keep": "paceline.checkpoint.retention",
    "LocalSGD": "paceline.optim.local_sgd",
    "Plan": "paceline.plan.plan",
    "World": "paceline.world.world",
    "debug_launcher": "paceline.launch.notebook",
    "find_executable_batch_size": "paceline.optim.batch_size",
    "get_logger": "paceline.observe.logs",
    "notebook_launcher": "paceline.launch.notebook",
    "set_seed": "paceline.data.seed",
    "skip_first_batches": "paceline.data.skip",
    # the exception tree
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

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from paceline.accelerator import Accelerator as Accelerator
    from paceline.base.errors import PacelineError as PacelineError
    from paceline.data.seed import set_seed as set_seed
    from paceline.launch.notebook import notebook_launcher as notebook_launcher


__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
