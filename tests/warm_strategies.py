"""For `warm_python`: imports what scripts load at their first `prepare`, and reads the settings once, which loads dialects."""

import importlib
import pkgutil

from paceline.config import resolve_run

for package in ("data", "optim", "parallel", "precision", "run", "world"):
    folders = importlib.import_module(f"paceline.{package}").__path__
    for module in pkgutil.walk_packages(folders, f"paceline.{package}."):
        importlib.import_module(module.name)
resolve_run(env={})
