"""The imports that a script begins with, without the collection of garbage that they would pay for."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator

from paceline.base.lazy import uncollected


def import_ahead(source: bytes, path: str, served: Collection[str] = (), only: Collection[str] | None = None) -> None:
    """Runs the imports of installed packages that a script begins with; the script then finds them imported.

    Imports only add objects, and looking through these again and again takes a sixth of the time that Hugging Face's
    libraries need (0.8 of 5 s). A module of the script's own may do anything while it is imported, the whole training
    included: neither it nor what follows it is run here.

    Args:
        source: of the script.
        path: of the script, for tracebacks.
        served: packages that are installed under no other name (see `paceline.compat`).
        only: no statement is run from the first one on that imports another package than these, which are served or
            installed, or one of Python's own; None allows all.
    """
    statements = list(_leading_imports(source, path, served, only))
    if not statements:
        return
    code = compile(ast.Module(statements, []), path, "exec", dont_inherit=True)
    try:
        with uncollected():
            exec(code, {"__name__": "__main__", "__file__": path})
            # What was imported stays: no later collection looks through it. The first one would (0.1 s), so before it.
            gc.freeze()
    except Exception:
        # The script runs the same statement next, and fails there by itself.
        return


def _leading_imports(
    source: bytes, path: str, served: Collection[str], only: Collection[str] | None
) -> Iterator[ast.stmt]:
    try:
        tree = ast.parse(source, path)
    except SyntaxError:  # running it says so
        return
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            names = [statement.module or ""]
        else:
            return
        packages = {name.partition(".")[0] for name in names}
        if packages == {"__future__"}:
            continue
        if only is not None and not packages <= {*only, *sys.stdlib_module_names}:
            return
        if not all(package in served or _is_installed(package) for package in packages):
            return
        yield statement


def _is_installed(package: str) -> bool:
    """Whether it lies where packages are installed, or came with Python."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    folders = tuple(f"{folder}{os.sep}" for folder in _installed_folders())
    return any(place.startswith(folders) for place in places)


def _installed_folders() -> list[str]:
    """Where Python's own modules and installed packages lie."""
    return [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
