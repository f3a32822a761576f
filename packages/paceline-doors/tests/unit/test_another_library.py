"""A distribution of somebody else's has the names of one more library: they are served, and have a door."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import CompatError
from paceline.base import registry
from paceline.cli.main import main
from paceline.compat import install
from paceline_doors.environments import Environment

NAMES = """
VERSION = "2.0"
ABOUT = {"__author__": "somebody"}
COMMANDS = {"toy": "toy_names.work:main"}
IMPORTED_WITH = {"toy": "toy"}


def modules():
    return {"toy": frozenset({"work", "rest"})}


def imports():
    return {}


def carried():
    return {"work": "toy_names.work:work"}


def after_install(*, newly, found_before):
    pass


def notices():
    return []


def native_way(name):
    return "toys do not rest", "let them work"
"""
FILES = {
    "toy_names/__init__.py": NAMES,
    "toy_names/work.py": "def work():\n    return 'done'\n\n\ndef main():\n    print(work())\n",
    "toy_names/for_children/toy/__init__.py": "from paceline.compat import install\n\ninstall(['toy'])\n",
    "toy_names/for_children/toy-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 2.0\n",
    "toy_names/for_children/toy-2.0.dist-info/INSTALLER": "paceline\n",
    "paceline-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: paceline\nVersion: 0.1.0\n",
    "toy_part-1.0.dist-info/entry_points.txt": "[paceline.libraries]\ntoy = toy_names\n",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages with the distribution, on the path of this process for the length of a test."""
    folder = tmp_path / "lib" / "site-packages"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    finders = list(sys.meta_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(folder)
    registry._all_points.cache_clear()
    yield folder
    registry._all_points.cache_clear()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in ("toy", "toy_names")]:
        del sys.modules[name]


def test_its_names_are_served(packages: Path) -> None:
    install(["toy"])
    toy = importlib.import_module("toy")
    assert toy.work() == "done"
    with pytest.raises(CompatError, match="toys do not rest"):
        toy.rest()


def test_its_door_is_put_in_and_taken_out(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / "bin"
    scripts.mkdir()
    environment = Environment(packages, scripts, Path(sys.executable), (str(scripts), str(tmp_path), str(packages)))
    monkeypatch.setattr(Environment, "active", lambda: environment)
    before = set(tmp_path.rglob("*"))
    assert main(["doors", "install", "toy"]) == 0
    assert (packages / "toy" / "__init__.py").is_file() and (
        packages / "toy-2.0+paceline.dist-info" / "RECORD"
    ).is_file()
    path = {"PYTHONPATH": ":".join([str(packages), *sys.path])}
    assert subprocess.run([scripts / "toy"], env=path, capture_output=True, text=True, check=True).stdout == "done\n"
    assert main(["doors", "remove", "toy"]) == 0
    assert set(tmp_path.rglob("*")) - before <= set(packages.rglob("__pycache__")) | set(packages.rglob("*.pyc"))
