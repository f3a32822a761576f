"""What accelerate's trackers call in the libraries that they write to, with stand-ins for those libraries.

A stand-in takes every call and writes it down, so this shows the same calls under the real accelerate (`record_trackers.py`
keeps them in `recorded_trackers.json`) and under the names that we serve, and none of the libraries need be installed.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np

LIBRARIES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
# What code computes with or compares, where a stand-in would not do.
VALUES = {
    "mlflow.utils.validation.MAX_PARAM_VAL_LENGTH": 20,
    "mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH": 2,
    "mlflow.search_experiments": lambda *args, **kwargs: [],
    "mlflow.active_run": lambda *args, **kwargs: None,
    "clearml.Task.current_task": lambda *args, **kwargs: None,
    "dvclive.plots.Metric.could_log": lambda value: isinstance(value, int | float),
}
calls: list[list] = []


def shown(value):
    """A value as JSON, the same in every process."""
    if isinstance(value, Recorder):
        return f"<{value._path}>"
    if isinstance(value, np.ndarray):
        return f"<array {list(value.shape)}>"
    if isinstance(value, dict):
        return {str(name): shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Recorder:
    """Takes every call and attribute."""

    def __init__(self, path):
        self.__dict__["_path"] = path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        return VALUES.get(path, Recorder(path))

    def __setattr__(self, name, value):
        calls.append([f"{self._path}.{name} =", [shown(value)], {}])

    def __setitem__(self, name, value):
        calls.append([f"{self._path}[] =", [shown(name), shown(value)], {}])

    def __getitem__(self, name):
        return Recorder(f"{self._path}[{name!r}]")

    def __call__(self, *args, **kwargs):
        calls.append([self._path, shown(args), shown(kwargs)])
        return Recorder(f"{self._path}()")

    def __enter__(self):
        calls.append([f"{self._path}.__enter__", [], {}])
        return self

    def __exit__(self, *failure):
        calls.append([f"{self._path}.__exit__", [], {}])


class StandIn(ModuleType):
    """A module of such a library."""

    __version__ = "9.9.9"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        return VALUES.get(path, Recorder(path))


class Finder(MetaPathFinder, Loader):
    """Finds stand-ins."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in LIBRARIES else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def attempt(found, name, work):
    """Keeps the calls of one step, or its error."""
    calls.clear()
    try:
        work()
        found[name] = list(calls)
    except Exception as error:
        found[name] = type(error).__name__


def tracked(kind, config, images):
    """One tracker's calls by step."""
    found = {"class": [kind.__name__, kind.name, kind.requires_logging_directory, kind.main_process_only]}
    calls.clear()
    tracker = kind("run", ".") if kind.requires_logging_directory else kind("run")
    found["init"] = list(calls)
    steps = {
        "start": tracker.start,
        "tracker": lambda: calls.append([shown(tracker.tracker)]),
        "config": lambda: tracker.store_init_configuration(dict(config)),
        "log": lambda: tracker.log({"train_loss": 0.5, "eval_acc": 1}, step=3),
        "log more": lambda: tracker.log({"a": 0.5, "text": "b", "many": {"x": 1.0}}),
        "log_images": lambda: tracker.log_images(images, 2),
        "log_table": lambda: tracker.log_table("table", ["a", "b"], [[1, 2]], None, 4),
        "log_artifact": lambda: tracker.log_artifact("file.txt", "folder"),
        "log_artifacts": lambda: tracker.log_artifacts("folder", "there"),
        "log_figure": lambda: tracker.log_figure("figure", "f.png"),
        "finish": tracker.finish,
    }
    for step, work in steps.items():
        if hasattr(tracker, step) or not step.startswith("log_"):
            attempt(found, step, work)
        else:
            found[step] = "none"
    return found


def run_all():
    """Each tracker's calls, by tracker and step."""
    sys.meta_path.insert(0, Finder())
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    config = {"lr": 0.1, "layers": 2, "name": "toy", "flag": True, "nothing": None, "long": "x" * 30}
    images = {"picture": [np.zeros((2, 2, 3), dtype=np.uint8)]}
    results = {}
    for name in LIBRARIES:
        results[name] = tracked(LOGGER_TYPE_TO_CLASS[name], config, images)
    return results


if __name__ == "__main__":
    import json

    os.environ.pop("WANDB_MODE", None)
    print(json.dumps(run_all(), indent=1, sort_keys=True))
