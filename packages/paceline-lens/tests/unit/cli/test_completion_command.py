"""`paceline completion`: a real bash completes with what it prints."""

import shutil
import subprocess
import sys

import pytest

from paceline.cli.main import main

# Completes the last word as bash does when somebody presses the Tab key.
PRESS_TAB = """
source paceline.bash
press_tab() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    local name=$(complete -p paceline | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
    $name paceline "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
}
press_tab paceline lau
press_tab paceline launch --mixed
press_tab paceline launch --procs 2 tra
press_tab paceline launch train.py --data tes
press_tab paceline launch --config run
press_tab paceline checkpoint ver
press_tab paceline wat
press_tab paceline watch seen/fi
press_tab paceline ps --al
press_tab paceline metrics --po
press_tab paceline launch --on-hang le
press_tab paceline launch --watch-dir se
"""


def test_bash_completes_commands_flags_and_files(tmp_path, capsys):
    for name in ("train.py", "test.csv", "run.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "seen" / "first").mkdir(parents=True)
    assert main(["completion", "bash"]) == 0
    (tmp_path / "paceline.bash").write_text(capsys.readouterr().out)
    done = subprocess.run(["bash", "-c", PRESS_TAB], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    completed = ["launch", "--mixed-precision", "train.py", "test.csv", "run.yaml", "verify"]
    completed += ["watch", "seen/first", "--all", "--port", "leave", "seen"]
    assert [line.strip() for line in done.stdout.splitlines()] == completed


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "paceline" in script and "checkpoint" in script and "launch" in script


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_and_files(tmp_path, capsys):
    assert main(["completion", "fish"]) == 0
    (tmp_path / "paceline.fish").write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    ask = "source paceline.fish; complete -C 'paceline la'; complete -C 'paceline launch --mixed-p'; "
    ask += "complete -C 'paceline launch tr'; complete -C 'paceline checkpoint ver'"
    done = subprocess.run(["fish", "-c", ask], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words == ["launch", "--mixed-precision", "train.py", "verify"]


def test_without_shtab_it_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    error = capsys.readouterr().err
    assert "[completion-shtab]" in error and "fix: pip install shtab" in error


def test_a_shtab_that_is_too_old_is_named(monkeypatch, capsys):
    monkeypatch.setattr("shtab.SUPPORTED_SHELLS", ["bash", "zsh", "tcsh"])
    assert main(["completion", "fish"]) == 2
    error = capsys.readouterr().err
    assert "does not know this shell" in error and "fix: pip install --upgrade shtab" in error
