"""The `paceline` command: finds its commands, loads little, prints each error once."""

import json
import subprocess
import sys
import textwrap

import pytest

from paceline.base import registry
from paceline.base.errors import LaunchError
from paceline.cli import main as cli
from paceline.config.settings import RunSettings, settings_of

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
    assert len(modules) < 210  # what makes it fast: a clock would measure this machine


def test_an_older_python_is_named():
    code = "import sys; sys.version_info = (3, 10, 13); import paceline"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: Paceline needs Python 3.11 or newer" in done.stderr.splitlines()[-1]


def test_commands_are_entry_points(tmp_path, monkeypatch, capsys):
    (tmp_path / "greetings").mkdir()
    (tmp_path / "greetings" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "greetings" / "greet.py").write_text('"""Says hello."""\n')
    (tmp_path / "greetings-1.0.dist-info").mkdir()
    points = tmp_path / "greetings-1.0.dist-info" / "entry_points.txt"
    points.write_text("[paceline.commands]\nhello = greetings.greet\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._all_points.cache_clear()
    assert cli.commands()["hello"] == "Says hello"
    assert cli.main([]) == 0
    assert "hello" in capsys.readouterr().out
    monkeypatch.undo()
    registry._all_points.cache_clear()


def test_every_command_has_one_line_of_help():
    for name, line in cli.commands().items():
        assert line and len(line) < 80, name


@pytest.mark.needs("lens")
def test_help_of_a_command_by_its_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["help", "checkpoint", "ls"])
    assert capsys.readouterr().out.startswith("usage: paceline checkpoint ls")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("paceline 0.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lanch"], "write `paceline launch`" if "launch" in COMMANDS else "there is no command 'lanch'"),
        (["run", "--procs", "2", "train.py"], "write `paceline launch --procs 2 train.py`"),
        (["explane"], "write `paceline explain`"),
        (["explian"], "write `paceline explain`"),
        (["explain", "--prcs", "2"], "write --procs"),
        (["explain", "--precision", "bf16"], "write --mixed-precision"),
        (["launch", "--plan", "zero=2,shard=2", "train.py"], "write --zero 2 --shard 2"),
        (["launch", "--plan=shard=auto", "train.py"], "write --shard auto"),
        (["explain", "--procs"], "expected one argument"),
        pytest.param(["explain", "--use_megatron_lm"], "[accelerate-feature]", marks=pytest.mark.needs("accelerate")),
        (["explain", "--redirects", "3"], "[launcher-flag]"),
        (["train.py", "--lr", "0.1"], "write `paceline launch train.py --lr 0.1`"),
        (["-n", "2", "train.py"], "write `paceline launch -n 2 train.py`"),
        (["launch", "--watch=w", "train.py"], "write --watch-dir 'w'"),
        (["launch", "--debug=yes", "train.py"], "write --debug"),
        (["--vrsion"], "write `paceline --version`"),
        (["launch", "--procs", "2"], "name it after the options: `paceline launch --procs 2 train.py --lr 0.1`"),
        (["explain", "--procs", "2", "train.py"], "`paceline plan --procs 2 train.py` explains the plan of a script"),
        (["explain", "stray"], "does not take 'stray'.  [command-line]"),
        (["config", "--dry-run"], "does not take '--dry-run', which would change nothing here"),
        (["test", "--zero", "2"], "does not take '--zero', which would change nothing here"),
        (["explain", "--procs", "0"], "procs cannot be '0'"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words, said, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("paceline.ConfigError: ") and err.count("paceline.ConfigError") == 1
    assert said in err and "fix: " in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # The nearest spelling of these is a flag that means something else.
        (["--steps", "3", "train.py"], "write it after the script: `paceline launch train.py --steps 3`"),
        (["--plan", "mine.json", "train.py"], "write it after the script: `paceline launch train.py --plan mine.json`"),
        (["--lr", "0.1", "train.py"], "write it after the script: `paceline launch train.py --lr 0.1`"),
        (["--epochs=3", "train.py", "a"], "write it after the script: `paceline launch train.py a --epochs=3`"),
        (["--cpus", "4", "train.py"], "write it after the script: `paceline launch train.py --cpus 4`"),
        (["--verbose", "train.py"], "write it after the script: `paceline launch train.py --verbose`"),
        (["-x", "-m", "package"], "write it after the script: `paceline launch -m package -x`"),
        # What stands behind the value of an unknown flag is looked at, too.
        (
            ["-n", "2", "--steps", "3", "--verbose", "train.py", "--x"],
            "`--steps` and `--verbose` are not flags of `paceline launch`.  [command-line]\n  fix: if they belong to the "
            "script, write them after the script: `paceline launch -n 2 train.py --x --steps 3 --verbose`",
        ),
        # These are slips of the pen; hints are spelled as `--help` spells flags.
        (["--prcs", "2", "train.py"], "fix: write --procs"),
        (["--log_dirr", "a", "train.py"], "fix: write --log-dir"),
        (["--nproc_per_nod", "2", "train.py"], "fix: write --nproc-per-node"),
        (["--mixed_precison=bf16", "train.py"], "fix: write --mixed-precision"),
        (["--timeout", "9", "train.py"], "fix: write --timeout-s"),
        (["--complie", "train.py"], "fix: write --compile"),
    ],
)
def test_a_flag_before_the_script_is_a_slip_or_belongs_to_the_script(words, message, capsys):
    assert cli.main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "[command-line]" in error


@pytest.mark.parametrize(
    ("text", "words", "count"),
    [
        ("import torch", ["--watch"], 1),
        ("import torch", ["--watch", "--tee=2"], 1),
        ("import torch", ["--zero", "2"], 1),
        ("import torch; torch.zero_", ["--zero=2"], 1),  # the word is no argument there
        ("import torch", ["--bf16"], 1),
        *(
            ("import torch", words, 0)
            for words in (["--bf16", "False"], ["--fp16=no"], ["--fsdp", "off"], ["--zero3=0"])
        ),
        ("import torch", ["--gradient_checkpointing", "True"], 1),
        ("import argparse\nparser.add_argument('--zero-stage')", ["--zero", "2"], 0),  # argparse takes it for that
        ("import fire\ndef train(zero=1): ...", ["--zero", "2"], 0),
        ("import torch", ["--log_dir", "a"], 1),
        ("import argparse\nparser.add_argument('--watch')", ["--watch"], 0),
        ("import argparse\nparser.add_argument('--log_dir')", ["--log-dir", "a"], 0),
        ("import torch", ["--lr", "0.1", "watch"], 0),
    ],
)
def test_an_option_behind_a_script_that_does_not_know_it_is_told(tmp_path, capsys, text, words, count):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert cli.main(["launch", "--procs", "1", "--dry-run", str(script), *words]) == 0
    assert capsys.readouterr().err.count("what stands after the script is for the script") == count


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--nproc 2 train.py", "--procs 2 train.py"),
        ("--bf16 train.py --lr 1", "--mixed-precision bf16 train.py --lr 1"),
        ("--fsdp train.py", "--zero 3 train.py"),
        ("--zero3 train.py", "--zero 3 train.py"),
        ("--nproc=2 --bf16 --fsdp train.py", "--procs 2 --mixed-precision bf16 --shard 2 train.py"),
        ("--nproc 2 --lr 1 train.py", "--procs 2 train.py --lr 1"),
    ],
)
def test_what_other_libraries_call_a_flag_is_told_with_the_command_line_that_works(tmp_path, capsys, words, command):
    (tmp_path / "train.py").write_text("")
    assert cli.main(["launch", *words.replace("train.py", str(tmp_path / "train.py")).split()]) == 2
    error = capsys.readouterr().err
    (written,) = [line for line in error.splitlines() if "`paceline launch " in line and "fix" in line]
    typed = written.rpartition("`paceline launch ")[2].rstrip("`")
    assert typed.replace(str(tmp_path / "train.py"), "train.py") == command
    assert cli.main(["launch", "--dry-run", *typed.split()]) == 0


def test_an_argument_that_no_line_of_the_script_reads_is_told(tmp_path, capsys):
    (tmp_path / "options.py").write_text("import argparse\nargparse.ArgumentParser().add_argument('--lr')")
    (tmp_path / "reads.py").write_text("import options")
    (tmp_path / "silent.py").write_text("import torch")
    for name, count in (("reads.py", 0), ("silent.py", 1)):
        assert cli.main(["launch", "--dry-run", str(tmp_path / name), "--lr", "1"]) == 0
        assert capsys.readouterr().err.count("reads no arguments") == count


@pytest.mark.needs("lens")
def test_an_option_of_tune_behind_the_script_is_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch")
    assert cli.main(["tune", "--trials", "0", str(script), "--micro_sizes", "4"]) == 2
    error = capsys.readouterr().err
    assert "`--micro_sizes 4`: what stands after the script is for the script" in error and "[tune-value]" in error


@pytest.mark.needs("lens")
@pytest.mark.parametrize("command", ["plan", "tune", "verify"])
def test_a_script_that_is_missing_is_told_before_the_rehearsal(command, capsys):
    assert cli.main([command, "missing.py"]) in (1, 2)
    assert "[launch-script]" in capsys.readouterr().err


@pytest.mark.needs("lens")
@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_command_for_scripts_takes_them_as_launch_does(command):
    words = ["--procs", "2", "train.py", "--lr", "0.1", "--json"]
    of_launch = cli.parsed(cli.parser_for("launch"), words)
    args = cli.parsed(cli.parser_for(command), words)
    assert (args.script, args.script_args) == (of_launch.script, of_launch.script_args) == ("train.py", words[3:])


def listed(command, capsys):
    """The long flags that `--help` of a command lists."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return {word.rstrip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}


@pytest.mark.needs("lens")
def test_help_lists_what_a_command_uses(capsys):
    settings = {setting.flag for setting in settings_of().values()}
    assert settings <= listed("launch", capsys)
    about_one_launch = {"--module", "--no-python", "--dry-run"}
    assert settings & listed("explain", capsys) == settings - about_one_launch
    assert settings & listed("config", capsys) == settings - about_one_launch
    of_run = {setting.flag for setting in settings_of(RunSettings).values()}
    not_tested = {"--module", "--no-python", "--compat", *of_run} - {"--cpu", "--debug", "--timeout-s"}
    assert settings & listed("test", capsys) == settings - not_tested
    planned = of_run | {"--procs", "--nodes", "--module", "--compat", "--config"}
    assert settings & listed("plan", capsys) == planned


def test_help_spells_flags_alike(capsys):
    for command in COMMANDS:
        if command != "deepspeed" and " " not in command:
            assert not [flag for flag in listed(command, capsys) if "_" in flag]


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


@pytest.mark.parametrize(
    ("shell", "status", "message"),
    [
        ("--version >&-", 0, ""),
        ("nothing 2>&-", 2, ""),
        (
            "--version >/dev/full",
            1,
            "paceline: a disk is full: the output, or a file of this command, cannot be written\n",
        ),
    ],
)
def test_output_that_is_closed_or_full(shell, status, message):
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m paceline {shell}', sys.executable], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", message)


@pytest.mark.needs("lens")
def test_a_working_directory_that_was_removed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert cli.main(["ps"]) == 2
    assert "the working directory of this command does not exist" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as exited:
        cli.main(["launch", "--help"])
    assert exited.value.code == 0 and "paceline launch" in capsys.readouterr().out


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("paceline ")
