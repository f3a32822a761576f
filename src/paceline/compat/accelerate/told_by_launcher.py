"""What the launcher was told, in accelerate's own environment variables.

Libraries on top of accelerate read some of them before they make an `Accelerator`: transformers' `TrainingArguments` takes
its precision from ACCELERATE_MIXED_PRECISION, and without it would ask for float32 whatever the launcher was told.
"""

from __future__ import annotations

from paceline.base import env as environment
from paceline.config import resolve_run


def export_settings() -> None:
    """Sets ACCELERATE_MIXED_PRECISION to what `--mixed_precision`, the environment or a config file says.

    Raises:
        ConfigError: what the settings say is wrong.
    """
    resolved = resolve_run({})
    precision = next(choice for choice in resolved.decisions if choice.field == "mixed_precision")
    if precision.source != "default":
        environment.export({"ACCELERATE_MIXED_PRECISION": resolved.settings.mixed_precision})
