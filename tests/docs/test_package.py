"""The wheel and the sdist: what they say of themselves, and that the quickstart runs with nothing of this folder."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from paceline.base.version import VERSION

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT / "packages" / "paceline", check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"paceline-{VERSION}.dist-info/METADATA").decode()
    headers = metadata.partition("\n\n")[0]
    for python in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Classifier: Programming Language :: Python :: {python}\n" in headers
    for line in ("Author: The Paceline developers", "Classifier: Typing :: Typed", "License-Expression: Apache-2.0"):
        assert line in headers.splitlines()
    for label in ("Documentation", "Source", "Changelog", "Issues"):
        assert re.search(f"^Project-URL: {label}, https://", headers, re.MULTILINE)
    assert "paceline/py.typed" in names
    assert f"paceline-{VERSION}.dist-info/licenses/LICENSE" in names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


def test_each_part_has_the_licence() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert {file.read_bytes() for file in ROOT.glob("packages/*/LICENSE")} == {licence}
    assert len(list(ROOT.glob("packages/*/LICENSE"))) == len(list(ROOT.glob("packages/*/pyproject.toml")))


def test_the_version_stands_in_one_place() -> None:
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        assert project["dynamic"] == ["version"] and "version" not in project


@pytest.mark.long  # `make package` and `make release` do the same with dependencies from an index
@pytest.mark.timeout(600)
def test_the_quickstart_runs_with_what_the_wheel_and_the_sdist_install(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "dev" / "package.py", "--borrow", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = []
    for part in (
        "paceline",
        "paceline_accelerate",
        "paceline_deepspeed",
        "paceline_doors",
        "paceline_hosts",
        "paceline_large",
        "paceline_lens",
    ):
        expected += [f"{part}-{VERSION}-py3-none-any.whl", f"{part}-{VERSION}.tar.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


# -- a release -------------------------------------------------------------------------------------------------


CHANGES = """# Changes

Introduction.

## 0.2.0 (2026-12-01)

First.

### Launching

- a

## 0.1.0 (not released)

- b
"""


def test_notes_are_the_section_of_the_version() -> None:
    release = runpy.run_path(str(ROOT / "dev" / "release.py"))
    assert release["notes_of"](CHANGES, "0.2.0") == "First.\n\n### Launching\n\n- a\n"
    for version in ("0.1.0", "0.3.0"):  # one that says that it is not released, and one that is not there
        with pytest.raises(SystemExit):
            release["notes_of"](CHANGES, version)
