"""The same programs under the real accelerate (recorded) and under the names that we serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from as_recorded import assert_close

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded.json").read_text(encoding="utf-8"))


def served(function, *args):
    """Runs one of the programs where accelerate's names are served; in a process of its own, which may be changed."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import programs

    return json.loads(json.dumps(getattr(programs, function)(*args)))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the programs give here, by number of processes."""
    folders = {size: str(tmp_path_factory.mktemp("run")) for size in ("1", "2")}
    return {
        size: run_ranks(served, world=int(size), args=("everything", folder), group=size != "1", timeout_s=100)[0]
        for size, folder in folders.items()
    }


@pytest.mark.parametrize("program", sorted(RECORDED["2"].keys() - {"version"}))
@pytest.mark.parametrize("size", ["1", "2"])
def test_as_recorded(found, size: str, program: str) -> None:
    assert_close(found[size][program], RECORDED[size][program], program)


def test_goes_on_from_a_folder_that_accelerate_saved(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "checkpoint", tmp_path / "checkpoint")
    found = run_ranks(served, world=1, args=("resume", str(tmp_path)), group=False)[0]
    assert_close(found, RECORDED["1"]["resume"])


def test_loads_it_on_two_processes(tmp_path: Path) -> None:
    """The second one has no random streams there, and keeps its own; all else is the same."""
    shutil.copytree(REFERENCE / "checkpoint", tmp_path / "checkpoint")
    found = run_ranks(served, world=2, args=("resume", str(tmp_path)))
    assert_close(found[0]["weights"], RECORDED["1"]["resume"]["weights"])
    assert found[0]["weights"] == found[1]["weights"]
