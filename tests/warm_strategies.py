"""For `warm_python`: does once what scripts do at their first `prepare`: imports, dialects of settings, torch's operators."""

import importlib
import pkgutil

from paceline.config import resolve_run
from paceline.torch_internals.dtensor import operators_of_mixtures

for package in ("data", "optim", "parallel", "precision", "run", "world"):
    folders = importlib.import_module(f"paceline.{package}").__path__
    for module in pkgutil.walk_packages(folders, f"paceline.{package}."):
        importlib.import_module(module.name)
resolve_run(env={})
operators_of_mixtures()
