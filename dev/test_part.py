"""Builds a part, installs it with its dependencies into an environment of its own, and runs its tests there.

python dev/test_part.py PART [words for pytest]

PART    a folder of packages/

Its wheel and those of the parts that it depends on are built from the working tree. Besides them the environment has what
these name as dependencies, and the group `test` of the part's `pyproject.toml`: no other part of Paceline, and no library
that another one needs. The tests are `packages/PART/tests`; helpers in `tests/` are shared.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from package import ROOT, build, run

CONSTRAINTS = ROOT / "constraints.txt"


def declared(part: str) -> dict[str, Any]:
    """The `pyproject.toml` of a part."""
    return tomllib.loads((ROOT / "packages" / part / "pyproject.toml").read_text(encoding="utf-8"))


def with_dependencies(part: str) -> list[str]:
    """A part and those of ours that it depends on, directly or not."""
    found: list[str] = []
    waiting = [part]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += [needed for needed in declared(name)["project"]["dependencies"] if needed.startswith("paceline")]
    return found


def environment_for(part: str, wheels: Sequence[Path]) -> Path:
    """Makes the environment of a part, or brings it up to date; returns its Python.

    The libraries stay until a declaration changes; the wheels of ours are installed anew each time.
    """
    folder = ROOT / f".venv-part-{part}"
    python = folder / "bin" / "python"
    declarations = [ROOT / "packages" / name / "pyproject.toml" for name in with_dependencies(part)]
    contents = b"".join(path.read_bytes() for path in [CONSTRAINTS, *declarations])
    stamp = folder / f".setup-done-{hashlib.sha256(contents).hexdigest()[:16]}"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    if not stamp.exists():
        run([sys.executable, "-m", "venv", "--clear", folder], ROOT)
        run([*pip, "-c", CONSTRAINTS, *wheels, *declared(part)["dependency-groups"]["test"]], ROOT)
        stamp.touch()
    run([*pip, "--no-deps", "--no-index", "--force-reinstall", *wheels], ROOT)
    return python


def main() -> None:
    part, *words = sys.argv[1:] or [""]
    tests = ROOT / "packages" / part / "tests"
    if not part or not tests.is_dir():
        sys.exit(f"say which part: one of {', '.join(path.parent.name for path in ROOT.glob('packages/*/tests'))}")
    with tempfile.TemporaryDirectory() as folder:
        wheels = [build(name, Path(folder))[0] for name in with_dependencies(part)]
        python = environment_for(part, wheels)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = words if any(word.startswith("packages/") for word in words) else [str(tests), *words]
    sys.exit(subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
