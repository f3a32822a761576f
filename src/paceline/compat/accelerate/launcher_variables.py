"""Sets accelerate's own environment variables to the values of this run's settings.

Libraries on top of accelerate read some of them before they make an `Accelerator`: transformers' `TrainingArguments` takes
its precision from ACCELERATE_MIXED_PRECISION, and without the variable it asks for float32, whatever the launcher's flags
say. The launcher sets the variables of FSDP, of the sizes of axes and of the compiler (`engines.variables_of_said`).
"""

from __future__ import annotations

from paceline.base import env as environment
from paceline.config import resolve_run

# Setting -> accelerate's variable for it.
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
}


def export_settings() -> None:
    """Sets the variables of the settings that flags, the environment or a config file give.

    Raises:
        ConfigError: a setting has a wrong value.
    """
    variables = {}
    for decision in resolve_run({}).decisions:
        if decision.field in _VARIABLES and decision.source != "default":
            text = str(decision.value)
            variables[_VARIABLES[decision.field]] = text.lower() if isinstance(decision.value, bool) else text
    environment.export(variables)
