"""Patches that make the import of transformers faster; `paceline.compat` applies them while transformers is imported.

Two things take CPU time for nothing. They were measured with release 5.23, where `from transformers import Trainer` takes
1.6 s once torch is imported:

    0.3 s     transformers reads the files of all its models twice, and all of their lines
    0.25 s    its losses for object detection import SciPy's optimizers, which only models of that kind use

A release that does these things differently is not patched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.base import env as environment
from paceline.config.places import user_folder

# The modules of losses that import SciPy's `linear_sum_assignment`.
DETECTION_LOSSES = tuple(
    f"transformers.loss.loss_{name}"
    for name in ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
)
_DIGEST_SIZE = 32  # bytes
_SCIPY_IMPORT = "\nif is_scipy_available():\n    from scipy.optimize import linear_sum_assignment\n"


def scan_models_once(module: ModuleType) -> None:
    """Patches `transformers.utils.import_utils`, which then reads the files of models only where they have changed.

    transformers reads 2,500 files at each start, twice: it caches the result for a folder, but its cache has room for fewer
    folders than there are models.
    """
    names = ("create_import_structure_from_path", "fetch__all__")
    if not all(callable(getattr(module, name, None)) for name in names):
        return
    scan = getattr(module.create_import_structure_from_path, "__wrapped__", module.create_import_structure_from_path)
    by_folder: dict[str, Any] = {}

    @functools.wraps(scan)
    def scan_once(module_path: Any) -> Any:
        folder = os.fspath(module_path)
        # A file stands for its folder.
        if os.path.isfile(folder):
            folder = os.path.dirname(folder)
        if folder not in by_folder:
            if folder == models_folder:
                by_folder.update(_by_folder(folder, _kept_scan(folder, code_file, scan)))
            else:
                by_folder[folder] = scan(folder)
        return by_folder[folder]

    names_of = module.fetch__all__

    @functools.wraps(names_of)
    def names_of_tail(file_content: str) -> Any:
        # transformers splits the whole text into lines, and takes the last line that begins so.
        start = file_content.rfind("\n__all__")
        return names_of(file_content[start + 1 :])

    code_file = module.__file__ or ""
    models_folder = os.path.join(os.path.dirname(os.path.dirname(code_file)), "models")
    module.create_import_structure_from_path = scan_once  # type: ignore[attr-defined]
    module.fetch__all__ = names_of_tail  # type: ignore[attr-defined]


def _by_folder(folder: str, structure: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each folder with its structure: the keys that are strings are names of folders."""
    yield folder, structure
    for name, part in structure.items():
        if isinstance(name, str):
            yield from _by_folder(os.path.join(folder, name), part)


def _kept_scan(folder: str, code_file: str, scan: Callable[[str], Any]) -> Any:
    """Scans the folder of models, or reads what an earlier scan of the same files has found from the user's cache.

    The cached file is a digest, and the result as bytes. The digest is made of those bytes and of the path, the time and
    the size of each file that was scanned, and of the file with the code that scans. So a file that is out of date, damaged
    or of another release is scanned anew.
    """
    place = hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()
    try:
        state = repr((sys.version, _state(code_file), _states_below(folder))).encode()
        caches = user_folder(environment.snapshot(), "XDG_CACHE_HOME", ".cache")
    except (OSError, RuntimeError):
        # A link leads nowhere, or the user has no home folder: transformers itself does not care.
        return scan(folder)
    cache = caches / "paceline" / f"transformers-models-{place}"
    try:
        content = cache.read_bytes()
    except OSError:
        content = b""
    digest, data = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    if digest == _digest(state, data):
        return marshal.loads(data)
    structure = scan(folder)
    data = marshal.dumps(structure)
    # Where the cache cannot be written, the next start scans again.
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_name(f"{cache.name}.{os.getpid()}")
        unfinished.write_bytes(_digest(state, data) + data)
        unfinished.replace(cache)
    return structure


def _digest(state: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(state + data, digest_size=_DIGEST_SIZE).digest()


def _states_below(folder: str) -> list[tuple[str, int, int]]:
    """Returns the state of each file in a folder and in those below it, sorted by the paths."""
    states = []
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                else:
                    states.append(_state(entry))
    return sorted(states)


def _state(file: str | os.DirEntry[str]) -> tuple[str, int, int]:
    """Returns a file's path, the time of its last change in nanoseconds, and its size in bytes."""
    facts = os.stat(file)
    return os.fspath(file), facts.st_mtime_ns, facts.st_size


@contextmanager
def without_scipy(module: ModuleType) -> Iterator[None]:
    """Delays the import of SciPy by a module of losses, which is imported in the `with` block, until its first use."""
    utils: Any = sys.modules.get("transformers.utils")
    is_available: Callable[[], bool] | None = getattr(utils, "is_scipy_available", None)
    is_patchable = "scipy.optimize" not in sys.modules and _imports_as_expected(module)
    if is_available is None or not is_patchable or not is_available():
        yield
        return
    # The module's own `if is_scipy_available(): from scipy.optimize import ...` is skipped.
    utils.is_scipy_available = lambda: False
    try:
        yield
    finally:
        utils.is_scipy_available = is_available
    module.is_scipy_available = is_available  # type: ignore[attr-defined]
    module.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]


def _imports_as_expected(module: ModuleType) -> bool:
    """Whether the module asks `is_scipy_available` for the import of SciPy's function, and for nothing else."""
    path = Path(module.__file__ or "")
    # Installed without sources, or in an archive.
    if path.suffix != ".py" or not path.is_file():
        return False
    source = path.read_text(encoding="utf-8")
    guards = source.count("is_scipy_available()")
    return guards == 1 and source.count("scipy.optimize") == 1 and _SCIPY_IMPORT in source


def _linear_sum_assignment(*args: Any, **options: Any) -> Any:
    """Calls `scipy.optimize.linear_sum_assignment`."""
    return importlib.import_module("scipy.optimize").linear_sum_assignment(*args, **options)
