"""Imports that a script begins with run ahead of it, without collections; nothing else of it does."""

from __future__ import annotations

import gc
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
