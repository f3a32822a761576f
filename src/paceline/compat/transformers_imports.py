"""transformers is imported with less work: two things that its modules do as they are imported are left out.

Both were measured with release 5.23 (CPU time of the 1.6 s that `from transformers import Trainer` takes after torch):

    0.31 s    it looks through the files of all its models, twice, and through each of their lines
    0.25 s    its losses for object detection import SciPy's optimizers, which are then used by models of that kind alone

A release that does these things otherwise is imported as it is.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# The modules of losses that import SciPy's `linear_sum_assignment`.
DETECTION_LOSSES = tuple(
    f"transformers.loss.loss_{name}"
    for name in ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
)
_SCIPY_IMPORT = "\nif is_scipy_available():\n    from scipy.optimize import linear_sum_assignment\n"


def scan_models_once(module: ModuleType) -> None:
    """Lets `transformers.utils.import_utils` look once through the files of the models, from the line that it wants.

    The table of a folder is cached there too, but the cache holds fewer folders than there are models.
    """
    names = ("create_import_structure_from_path", "fetch__all__")
    if not all(callable(getattr(module, name, None)) for name in names):
        return
    scan = getattr(module.create_import_structure_from_path, "__wrapped__", module.create_import_structure_from_path)
    by_folder: dict[str, Any] = {}

    @functools.wraps(scan)
    def scan_once(module_path: Any) -> Any:
        # A file stands for its folder.
        folder = os.path.dirname(module_path) if os.path.isfile(module_path) else os.fspath(module_path)
        if folder not in by_folder:
            by_folder[folder] = scan(folder)
        return by_folder[folder]

    names_of = module.fetch__all__

    @functools.wraps(names_of)
    def names_of_tail(file_content: str) -> Any:
        # It takes the last line that begins so, and splits all lines before that.
        start = file_content.rfind("\n__all__")
        return names_of(file_content[start + 1 :])

    module.create_import_structure_from_path = scan_once  # type: ignore[attr-defined]
    module.fetch__all__ = names_of_tail  # type: ignore[attr-defined]


@contextmanager
def without_scipy(module: ModuleType) -> Iterator[None]:
    """While a module of losses is imported: SciPy is imported when `linear_sum_assignment` is first called."""
    utils: Any = sys.modules.get("transformers.utils")
    is_available: Callable[[], bool] | None = getattr(utils, "is_scipy_available", None)
    if (
        is_available is None
        or "scipy.optimize" in sys.modules
        or not _imports_as_expected(module)
        or not is_available()
    ):
        yield
        return
    utils.is_scipy_available = lambda: False
    try:
        yield
    finally:
        utils.is_scipy_available = is_available
    module.is_scipy_available = is_available  # type: ignore[attr-defined]
    module.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]


def _imports_as_expected(module: ModuleType) -> bool:
    """Whether the function that is patched guards the import of SciPy, and nothing else."""
    path = Path(module.__file__ or "")
    # Installed without sources, or in an archive.
    if path.suffix != ".py" or not path.is_file():
        return False
    source = path.read_text(encoding="utf-8")
    guards = source.count("is_scipy_available()")
    return guards == 1 and source.count("scipy.optimize") == 1 and _SCIPY_IMPORT in source


def _linear_sum_assignment(*args: Any, **options: Any) -> Any:
    """`scipy.optimize.linear_sum_assignment`."""
    return importlib.import_module("scipy.optimize").linear_sum_assignment(*args, **options)
