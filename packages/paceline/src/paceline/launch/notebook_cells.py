"""Finds the cell of a notebook, or the import in it, that has used an accelerator, and the cell in which a line stands."""

from __future__ import annotations

import ast
import linecache
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from paceline.base.devices import ACCELERATORS

_TYPES = "|".join(ACCELERATORS)
_TOUCHES = re.compile(
    rf"\.(?:{_TYPES})\(|\.to\(\s*['\"]?(?:{_TYPES}|device)|device\s*=\s*['\"](?:{_TYPES})|\bAccelerator\(|"
    rf"torch\.(?:{_TYPES})\.(?!is_available|is_initialized|device_count|manual_seed)\w+\("
)
_TRY_S = 60  # how long one import may take in a process of its own


def who_touched(kind: str) -> str:
    """Returns where this session began to use its accelerator; "" if it has not used it.

    Args:
        kind: "cuda", "xpu", ...
    """
    # Looked up, not imported: a session that has not imported torch has touched nothing.
    module = getattr(sys.modules.get("torch"), kind, None)
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return ""
    earlier_cells = _cells()[:-1]  # the last one is this call's
    return search(earlier_cells, partial(_imports_touch, kind=kind)) or "no cell shows where"


def place_of(file: str, line: int) -> str:
    """Returns where a line stands, in words: the number of a cell in a notebook, or else the name of the file.

    Args:
        file: the file name of the code object; for a cell this is a name that Jupyter has made up.
        line: from 1.
    """
    text = linecache.getline(file, line).strip()
    code = f": `{text}`" if text else ""
    source = "".join(linecache.getlines(file)).strip()
    # The made-up name has no number of a cell in it, so the cell is found by its text.
    for number, cell in enumerate(_cells()):
        if cell.strip() == source and source:
            return f"cell In[{number}], line {line}{code}"
    return f"{file}:{line}{code}"


def search(cells: Sequence[str], touches: Callable[[str], bool]) -> str:
    """Finds the first cell that uses an accelerator, by the text of the cells, or else by trying their imports one by one.

    Args:
        cells: the source of each, in the order of their numbers.
        touches: whether an import statement, run by itself, initialises the accelerator.
    """
    for number, cell in enumerate(cells):
        for line in cell.splitlines():
            if _TOUCHES.search(line.split("#")[0]) and not _in_function(cell, line):
                return f"cell [{number}]: `{line.strip()}`"
    # Each import is tried in a process of its own, which takes seconds, so this comes last.
    for number, cell in enumerate(cells):
        for statement in _imports(cell):
            if touches(statement):
                return f"cell [{number}]: `{statement}`"
    return ""


def _cells() -> list[str]:
    """Returns the source of the cells that were run, where each index is the number of a cell; [] outside of a notebook."""
    if "IPython" not in sys.modules:
        return []
    shell = sys.modules["IPython"].get_ipython()
    return [] if shell is None else list(shell.user_ns.get("In", []))


def _tree(cell: str) -> ast.Module:
    try:
        return ast.parse(cell)
    except SyntaxError:
        # Magics (`%`), shell commands (`!`) and questions (`?`) are no Python; the rest of the cell may be.
        lines = [line for line in cell.splitlines() if not line.lstrip().startswith(("%", "!", "?"))]
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError:
            return ast.parse("")


def _in_function(cell: str, line: str) -> bool:
    """Returns whether a line stands in a function's body, where it has not run by itself."""
    for node in ast.walk(_tree(cell)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            source = ast.get_source_segment(cell, node) or ""
            if line.strip() in source:
                return True
    return False


def _imports(cell: str) -> list[str]:
    return [ast.unparse(node) for node in _tree(cell).body if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports_touch(statement: str, kind: str) -> bool:
    """Tries an import in a process of its own."""
    code = f"{statement}\nimport sys, torch\nsys.exit(42 if torch.{kind}.is_initialized() else 0)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=_TRY_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 42
