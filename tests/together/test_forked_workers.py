"""What `--forks` says about tests that pass, fail and end their worker."""

import os
import subprocess
from pathlib import Path
from textwrap import dedent

from warm_python import executable

CONFTEST = """
from forked_workers import ForkedRun

def pytest_configure(config):
    config.pluginmanager.register(ForkedRun(2))
"""
FIRST = """
import os, pytest, time, warnings

def test_passes(tmp_path):
    warnings.warn("mind this")

def test_fails():
    print("printed by it")
    assert 1 == 2

def test_ends_its_worker():
    os._exit(3)

@pytest.mark.timeout(1)
def test_takes_too_long():
    time.sleep(60)
"""
SECOND = "def test_of_another_file():\n    pass\n"


def run(folder: Path, *words: str) -> str:
    for name, text in {"conftest.py": CONFTEST, "test_first.py": FIRST, "test_second.py": SECOND}.items():
        (folder / name).write_text(dedent(text), encoding="utf-8")
    helpers = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])}
    # A folder of its own, and no settings of this repository.
    command = [
        executable(),
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        *words,
    ]
    done = subprocess.run(
        [*command, str(folder)], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_each_test_is_reported_once_and_those_behind_a_crash_run(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "3 failed, 2 passed" in said
    assert "Timeout (>1.0s)" in said
    assert "printed by it" in said
    assert "mind this" in said
    assert "FAILED test_first.py::test_ends_its_worker - the worker of --forks has ended" in said


def test_it_stops_at_the_first_failure_where_it_is_asked_to(tmp_path: Path) -> None:
    assert "1 failed" in run(tmp_path, "-x", "test_first.py")
