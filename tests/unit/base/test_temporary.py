"""Without a folder for temporary files every command says so, and how to name one."""

import tempfile

import pytest

from paceline import ConfigError
from paceline.base import env
from paceline.base.temporary import temporary_folder
from paceline.cli.main import main


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


def test_launch_and_plan_say_so(no_folder, capfd):
    script = no_folder / "train.py"
    script.write_text("import torch\nfrom paceline import Accelerator\nAccelerator().prepare(torch.nn.Linear(1, 1))\n")
    assert main(["launch", str(script)]) == 2
    assert main(["plan", "--procs", "2", str(script)]) == 2
    output = capfd.readouterr().err
    assert output.count("[temporary-folder]") == 2 and "Traceback" not in output


def test_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_folder() == str(tmp_path)
