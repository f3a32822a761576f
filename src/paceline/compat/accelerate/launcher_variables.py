"""Sets accelerate's own environment variables to what this run's settings say.

Libraries on top of accelerate read some of them before they make an `Accelerator`: transformers' `TrainingArguments` takes
its precision from ACCELERATE_MIXED_PRECISION, and without it would ask for float32 whatever the launcher was told. Those of
FSDP, of the sizes of axes and of the compiler are set by the launcher (`engines.variables_of_said`).
"""

from __future__ import annotations

from paceline.base import env as environment
from paceline.config import resolve_run

# Setting -> the variable that says it.
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
}


def export_settings() -> None:
    """Sets the variables of settings that flags, the environment or a config file have said.

    Raises:
        ConfigError: what the settings say is wrong.
    """
    variables = {}
    for choice in resolve_run({}).decisions:
        if choice.field in _VARIABLES and choice.source != "default":
            text = str(choice.value)
            variables[_VARIABLES[choice.field]] = text.lower() if isinstance(choice.value, bool) else text
    environment.export(variables)
