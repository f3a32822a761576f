"""Imports that a script begins with run ahead of it, without collections; nothing else of it does."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.worker.script_imports import _is_installed, import_ahead


@pytest.fixture
def installed(tmp_path: Path, monkeypatch) -> Path:
    """A folder for packages that count as installed."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr("paceline.launch.worker.script_imports._installed_folders", lambda: [str(packages)])
    before = set(sys.modules)
    yield packages
    gc.unfreeze()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_leading_imports_of_installed_packages_run_without_collections(installed: Path, tmp_path: Path) -> None:
    (installed / "pkg_one.py").write_text("import gc; collects = gc.isenabled()")
    (installed / "pkg_two.py").write_text("import gc; collects = gc.isenabled(); name = 1")
    (installed / "pkg_three.py").write_text("")
    lines = ['"""What it does."""', "from __future__ import annotations", "import pkg_one", "from pkg_two import name"]
    script = "\n".join([*lines, "x = 1", "import pkg_three"]).encode()
    import_ahead(script, str(tmp_path / "train.py"))
    assert not sys.modules["pkg_one"].collects and not sys.modules["pkg_two"].collects
    assert "pkg_three" not in sys.modules, "it may depend on the statement before it"
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_a_module_of_the_scripts_own_is_left_to_the_script(installed: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "whole_training.py").write_text("")
    (installed / "pkg_later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_ahead(b"import whole_training\nimport pkg_later\n", str(tmp_path / "train.py"))
    assert "whole_training" not in sys.modules and "pkg_later" not in sys.modules


@pytest.mark.parametrize(
    "script", [b"import pkg_fails\n", b"import\n", b"from . import x\n", b"import no_such_package\n", b""]
)
def test_what_fails_is_left_to_the_script(installed: Path, tmp_path: Path, script: bytes) -> None:
    (installed / "pkg_fails.py").write_text("raise ValueError('at import')")
    import_ahead(script, str(tmp_path / "train.py"))
    assert gc.isenabled() and "pkg_fails" not in sys.modules


def test_what_came_with_python_or_pip_is_installed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "beside_the_script.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"os": True, "sys": True, "numpy": True, "torch": True, "beside_the_script": False, "nowhere_to_be": False}
    assert {name: _is_installed(name) for name in names} == names


def test_names_that_are_served_count_as_installed(installed: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "served_here.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_ahead(b"import served_here\n", str(tmp_path / "train.py"), served=["served_here"])
    assert "served_here" in sys.modules


BEFORE_FORK = """
import os, sys
from paceline.launch.worker import script_imports
from paceline.launch.launcher import Job, Target
from paceline.launch.launchers.local import import_before_fork

folder, packages = sys.argv[1:]
script_imports._installed_folders = lambda: [packages]
sys.path.insert(1, packages)
first = sys.path[0]
job = Job(Target("script", os.path.join(folder, "train.py")), procs=2, compat="accelerate", env={"HF_HOME": "elsewhere"})
import_before_fork(job)
assert sys.path[0] == first and "HF_HOME" not in os.environ
print(sys.modules["transformers"].home, [name for name in ("peft", "trl", "untried") if name in sys.modules])
"""


def test_what_bears_a_fork_is_imported_before_it(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "transformers.py").write_text("import os; home = os.environ['HF_HOME']")
    for name in ("peft", "trl", "untried"):
        (packages / f"{name}.py").write_text("")
    # It would be another one in the processes, whose path begins with this folder.
    (tmp_path / "trl.py").write_text("")
    for lines, imported in (
        (["import transformers", "import peft", "import untried"], "['peft']"),
        (["import transformers", "import trl", "import peft"], "[]"),
        (["import transformers", "import untried", "import peft"], "[]"),
    ):
        (tmp_path / "train.py").write_text("\n".join(lines))
        words = [sys.executable, "-c", BEFORE_FORK, str(tmp_path), str(packages)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert ended.stdout == f"elsewhere {imported}\n", ended.stderr
