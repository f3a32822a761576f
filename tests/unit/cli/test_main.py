"""The `paceline` command: finds its commands, loads little, prints each error once."""

import json
import subprocess
import sys
import textwrap

import pytest

from paceline.base.errors import LaunchError
from paceline.cli import main as cli

COMMANDS = sorted(cli.commands())


def in_fresh_python(words):
    code = f"""
        import sys
        from paceline.cli.main import main
        try:
            main({words!r})
        except SystemExit:
            pass
        import json
        print(json.dumps(sorted(sys.modules)), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


@pytest.mark.parametrize("words", [["--help"], *([*name.split(), "--help"] for name in COMMANDS)])
def test_help_loads_little(words):
    modules, text = in_fresh_python(words)
    assert text.startswith("usage: paceline")
    assert not modules & {"torch", "numpy", "yaml", "rich", "importlib.metadata"}
    assert len(modules) < 200  # what makes it fast: a clock would measure this machine


def test_commands_are_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "greet.py").write_text('"""Says hello."""\n')
    (tmp_path / "_hidden.py").write_text('"""No command."""\n')
    monkeypatch.setattr(cli, "_FOLDER", tmp_path)
    assert cli.commands() == {"greet": "Says hello"}
    assert cli.main([]) == 0
    assert "greet" in capsys.readouterr().out


def test_every_command_has_one_line_of_help():
    for name, line in cli.commands().items():
        assert line and len(line) < 80, name


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("paceline 0.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lanch"], "write `paceline launch`" if "launch" in COMMANDS else "there is no command 'lanch'"),
        (["explain", "--prcs", "2"], "write --procs"),
        (["explain", "--procs"], "expected one argument"),
        (["explain", "--use_deepspeed"], "[accelerate-feature]"),
        (["explain", "stray"], "does not take 'stray'.  [command-line]"),
        (["explain", "--procs", "0"], "procs cannot be '0'"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words, said, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("paceline.ConfigError: ") and err.count("paceline.ConfigError") == 1
    assert said in err and "fix: " in err and "Traceback" not in err


@pytest.mark.parametrize(("error", "status"), [(LaunchError("x", "it broke."), 1), (KeyboardInterrupt(), 130)])
def test_exit_codes(monkeypatch, capsys, error, status):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == status
    assert capsys.readouterr().err == ("paceline.LaunchError: it broke.  [x]\n" if status == 1 else "")


def test_a_reader_that_leaves_early():
    words = [sys.executable, "-m", "paceline", "explain"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=30) == 1


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("paceline ")
