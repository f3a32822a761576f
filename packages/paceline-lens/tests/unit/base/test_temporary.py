"""Without a folder for temporary files every command says so, and how to name one."""

import subprocess
import sys
import tempfile

import pytest

from paceline import ConfigError
from paceline.base import env
from paceline.base.temporary import temporary_folder
from paceline_lens.forecast.rehearsal import in_child


@pytest.fixture(params=["none", "gone"])
def no_folder(request, tmp_path, monkeypatch):
    """A system without any such folder; and one whose folder was removed after Python had chosen it."""
    candidates = [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(tempfile, "tempdir", None if request.param == "none" else candidates[0])
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: candidates)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_folder(no_folder):
    with env.patched({"TMPDIR": "/nonexistent"}), pytest.raises(ConfigError) as caught:
        temporary_folder()
    message = str(caught.value)
    assert caught.value.code == "temporary-folder"
    assert "TMPDIR is /nonexistent" in message and "fix: name a folder" in message


LAUNCH = """
import sys, tempfile
from paceline.cli.main import main
tempfile._candidate_tempdir_list = lambda: ["/nonexistent"]
sys.exit(main(["launch", sys.argv[1]]))
"""


def test_launch_says_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    done = subprocess.run([sys.executable, "-c", LAUNCH, script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "paceline.ConfigError: there is no folder for temporary files.  [temporary-folder]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rehearsal_says_so(no_folder):
    """What `paceline plan` and `tune` begin with."""
    with pytest.raises(ConfigError) as caught:
        in_child(lambda: None)
    assert caught.value.code == "temporary-folder"


def test_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_folder() == str(tmp_path)
