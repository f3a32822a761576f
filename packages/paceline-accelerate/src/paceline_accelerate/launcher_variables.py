"""Sets accelerate's own environment variables to the values of this run's settings.

Libraries on top of accelerate read some of them before they make an `Accelerator`: transformers' `TrainingArguments` takes
its precision from ACCELERATE_MIXED_PRECISION, and without the variable it asks for float32, whatever the launcher's flags
say. The launcher sets the variables of FSDP, of the sizes of axes and of the compiler (`engines.variables_of_said`).
"""

from __future__ import annotations

from importlib.machinery import PathFinder

from paceline.base import env as environment
from paceline.config import libraries, resolve_run

# What accelerate's launcher sets for every script, also if no flag says anything.
_DEFAULTS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
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
    variables: dict[str, str | None] = {}
    if "accelerate" in environment.get("PACELINE_COMPAT").split(","):
        given = environment.snapshot()
        variables |= {name: text for name, text in _DEFAULTS.items() if name not in given}
    for decision in resolve_run().decisions:
        if decision.field in _VARIABLES and decision.source != "default":
            text = str(decision.value)
            # accelerate writes "True" for the CPU, and "true" elsewhere.
            is_switch = isinstance(decision.value, bool) and decision.field != "cpu"
            variables[_VARIABLES[decision.field]] = text.lower() if is_switch else text
    environment.export(variables)


def deepspeed_is_asked() -> bool:
    """Returns whether the launcher was told to use DeepSpeed."""
    return environment.parse_bool(environment.snapshot().get("ACCELERATE_USE_DEEPSPEED", ""))


def serve_deepspeed() -> None:
    """Serves DeepSpeed's names too where the launcher asks for it and it is not installed: Trainer looks for it."""
    if (
        deepspeed_is_asked()
        and "deepspeed" in libraries.LIBRARIES.names()
        and PathFinder.find_spec("deepspeed") is None
    ):
        libraries.install(["deepspeed"])
