"""Runs the imports at the beginning of a script without garbage collection, which makes them faster."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator

from paceline.base.lazy import fast_imports


def import_ahead(source: bytes, path: str, served: Collection[str] = (), only: Collection[str] | None = None) -> None:
    """Runs the imports of installed packages at the beginning of a script, so the script finds them imported.

    Imports only create objects. Garbage collection looks through them again and again, which takes a sixth of the time that
    the imports of Hugging Face's libraries need (0.8 of 5 s). A module of the script's own may run anything while it is
    imported, even the whole training. So neither such an import nor a later statement is run here.

    Args:
        source: the source of the script.
        path: the path of the script, for tracebacks.
        served: packages that `paceline.compat` serves, so they need not be installed.
        only: the packages that may be imported, besides Python's own; it stops at the first other one. None allows all.
    """
    statements = list(_leading_imports(source, path, served, only))
    if not statements:
        return
    code = compile(ast.Module(statements, []), path, "exec", dont_inherit=True)
    try:
        with fast_imports():
            exec(code, {"__name__": "__main__", "__file__": path})
            # Modules stay until the end. So they are taken out of garbage collection before its first run, which would take
            # 0.1 s for them.
            gc.freeze()
    except Exception:
        # The script runs the same statement next, and raises the same error there.
        return


def _leading_imports(
    source: bytes, path: str, served: Collection[str], only: Collection[str] | None
) -> Iterator[ast.stmt]:
    """Yields the statements that may be run; the arguments are those of `import_ahead`."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError:
        return  # Python reports it when it runs the script
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
    """Returns whether a package is installed, or is one of Python's own."""
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
    """Returns the folders of Python's own modules and of installed packages."""
    return [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
