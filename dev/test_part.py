"""Builds a part, installs it with its dependencies into an environment of its own, and runs its tests there.

python dev/test_part.py PART [words for pytest]

PART    a folder of packages/

The environment has wheels of the part and of those of ours that it depends on, built from the working tree, what these name
as dependencies, and the group `test` of the part's `pyproject.toml`: no other part of Paceline, and no library that only
another one needs. The tests are `packages/PART/tests`, or the files that the words name; helpers in `tests/` are shared.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "packages"
CONSTRAINTS = ROOT / "constraints.txt"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def declared(part: str) -> dict[str, Any]:
    """The `pyproject.toml` of a part."""
    return tomllib.loads((PACKAGES / part / "pyproject.toml").read_text(encoding="utf-8"))


def with_dependencies(part: str) -> list[str]:
    """A part and those of ours that it depends on, directly or not."""
    parts: list[str] = []
    waiting = [part]
    while waiting:
        name = waiting.pop()
        if name not in parts:
            parts.append(name)
            waiting += [needed for needed in declared(name)["project"]["dependencies"] if needed.startswith("paceline")]
    return parts


def python_of(part: str) -> Path:
    """Makes the environment of a part, or brings it up to date; returns its Python.

    The libraries stay until a declaration changes; ours are built and installed anew each time.
    """
    folder = ROOT / f".venv-part-{part}"
    python = folder / "bin" / "python"
    sources = [PACKAGES / name for name in with_dependencies(part)]
    contents = b"".join(path.read_bytes() for path in [CONSTRAINTS, *(source / "pyproject.toml" for source in sources)])
    stamp = folder / f".setup-done-{hashlib.sha256(contents).hexdigest()[:16]}"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    if not stamp.exists():
        run([sys.executable, "-m", "venv", "--clear", folder])
        run([*pip, "-c", CONSTRAINTS, *sources, *declared(part)["dependency-groups"]["test"]])
        stamp.touch()
    run([*pip, "--no-deps", "--force-reinstall", *sources])
    return python


def run(words: list[str | Path]) -> None:
    subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, check=True)


def main() -> None:
    part, *words = sys.argv[1:] or [""]
    parts = sorted(path.name for path in PACKAGES.iterdir() if (path / "tests").is_dir())
    if part not in parts:
        sys.exit(f"say which part: make test-part PART=... with one of {', '.join(parts)}")
    has_files = any(word.startswith("packages/") for word in words)
    tests = [] if has_files else [f"packages/{part}/tests"]
    command = [python_of(part), "-m", "pytest", *tests, *words]
    sys.exit(subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode)


if __name__ == "__main__":
    main()
