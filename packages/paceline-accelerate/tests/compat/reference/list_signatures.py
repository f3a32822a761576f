"""Lists what accelerate's functions and methods take, by keyword: `python list_signatures.py > signatures.json`.

Run with the real library (1.15.0) in an environment of its own. A property is null.
"""

import importlib
import inspect
import json
from pathlib import Path

NAMES = Path(__file__).parents[3] / "src/paceline_accelerate/names.txt"
CLASSES = {"accelerate": ["Accelerator"], "accelerate.state": ["PartialState", "AcceleratorState", "GradientState"]}


def parameters(function):
    """Names of parameters, without those that collect the rest."""
    found = inspect.signature(function).parameters.values()
    return [
        each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name != "self"
    ]


listed = {}
for line in NAMES.read_text(encoding="utf-8").splitlines():
    name, _, names = line.partition(":")
    for each in names.split():
        value = getattr(importlib.import_module(name), each)
        if each.endswith("_available"):
            continue
        if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, (str, Exception))):
            listed.setdefault(each, parameters(value))
for name, kinds in CLASSES.items():
    for kind in kinds:
        owner = getattr(importlib.import_module(name), kind)
        for each in (each for each in dir(owner) if not each.startswith("_")):
            value = inspect.getattr_static(owner, each)
            callable_ = callable(value) or isinstance(value, staticmethod)
            listed[f"{kind}.{each}"] = parameters(getattr(owner, each)) if callable_ else None
print("{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(listed.items())) + "\n}")
