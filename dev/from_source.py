"""Runs Python with all parts as they lie in this tree. Nothing is installed or built, so no network is needed.

    python3 dev/from_source.py -m pytest tests/gpu
    python3 dev/from_source.py -m paceline launch --procs 2 train.py
    python3 dev/from_source.py benchmarks/gpu/bench_device.py

It is for machines whose own torch fits their driver. The Python that runs it needs what the core depends on. Entry points
(strategies, commands) are found by the metadata of a distribution, so it writes these from each `pyproject.toml`.
"""

from __future__ import annotations

import os
import runpy
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
METADATA = ROOT / "build" / "metadata"


def version() -> str:
    """The version of all parts."""
    return str(runpy.run_path(str(ROOT / "packages/paceline/src/paceline/base/version.py"))["VERSION"])


def entry_points(project: dict[str, Any]) -> str:
    """The entry points of a part, in the format of `entry_points.txt`."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    return "\n".join(lines)


def write_metadata(metadata: Path) -> list[Path]:
    """Writes the metadata of all parts into a folder; returns the folders that Python must search."""
    sources = []
    for file in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        folder = metadata / f"{project['name'].replace('-', '_')}-{version()}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        head = [f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {version()}\n"]
        needed = [f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"]]
        (folder / "METADATA").write_text("".join(head + needed), encoding="utf-8")
        (folder / "entry_points.txt").write_text(entry_points(project), encoding="utf-8")
        sources.append(file.parent / "src")
    return [metadata, *sources, ROOT / "tests", ROOT]


def missing(arguments: list[str]) -> list[str]:
    """The modules that this Python lacks for the command."""
    needed = ["torch", "cloudpickle", "numpy", "yaml", "safetensors"]
    if arguments[:2] == ["-m", "pytest"]:
        needed += ["pytest", "pytest_timeout", "xdist"]
    return [name for name in needed if find_spec(name) is None]


def main(arguments: list[str]) -> None:
    """Becomes the Python that runs the command."""
    if not arguments:
        raise SystemExit(__doc__)
    lacks = missing(arguments)
    if lacks:
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(lacks)}. `make setup` makes .venv/bin/python, which has them."
        )
    folders = [str(folder) for folder in write_metadata(METADATA)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, before] if before else folders)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
