"""Scripts, modules and devices that are not there, and plans that do not divide the processes: said before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.cli import launch as launch_command
from paceline.cli.main import main
from paceline.launch import host


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    for name in ("__init__", "evaluate"):
        (tmp_path / "package" / f"{name}.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "why", "fix"),
    [
        ("launch trian.py", "there is no such file", "write train.py"),
        ("launch somewhere/trian.py", "there is no such file", "write train.py"),
        ("launch package/evalute.py", "there is no such file", "write package/evaluate.py"),
        ("launch other.txt", "there is no such file", "give the path of a Python file"),
        ("launch .", "it is a directory", "write train.py"),
        ("launch ''", "its name is empty", "give the path of a Python file"),
        ("launch package", "it is a directory", "give the path of a Python file"),
        ("launch -m trian", "looked for trian in", "write train"),
        ("launch -m package.evalute", "looked for package.evalute in its package", "write package.evaluate"),
        ("launch -m pakage.evaluate", "looked for pakage in", "give the path of a Python file"),
        ("launch --no-python trian.py", "it is not on PATH", "give the path of a Python file"),
        pytest.param(
            "deepspeed trian.py", "there is no such file", "write train.py", marks=pytest.mark.needs("deepspeed")
        ),
        pytest.param(
            "plan --procs 2 trian.py", "there is no such file", "write train.py", marks=pytest.mark.needs("lens")
        ),
    ],
)
def test_a_missing_script_does_not_wait_for_torch(words, why, fix, folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(host, "accelerators", lambda: pytest.fail("that imports torch, which takes seconds"))
    assert main(shlex.split(words)) == 1
    text = capsys.readouterr().err
    assert "[launch-script]" in text and f"  why: {why}" in text and f"  fix: {fix}" in text


@pytest.mark.parametrize("name", ["train", "package.evaluate", "package", "json.tool", "sys"])
def test_modules_that_are_there(name, folder) -> None:
    assert host.unusable(host.Target("module", name)) is None


@pytest.mark.parametrize("name", ["outer.inner.train", "outer.plain.train", "plain.inner.train"])
def test_modules_in_folders_without_a_file_of_the_package(name, folder) -> None:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text("")
    if name.startswith("outer"):
        (folder / "outer" / "__init__.py").write_text("")
    assert host.unusable(host.Target("module", name)) is None
    problem = host.unusable(host.Target("module", name.replace("train", "trian")))
    assert problem is not None and problem.fix == f"write {name}"


def test_a_package_that_says_itself_where_its_modules_are(folder) -> None:
    (folder / "package" / "__init__.py").write_text("__path__.append('/elsewhere')\n")
    assert host.unusable(host.Target("module", "package.anything")) is None


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        ("--tp 3 --procs 2", "plan-size", "start 3 processes (`--procs 3` on one node), or change tp"),
        ("--tp 2 --procs 3", "plan-size", "start 2 processes (`--procs 2` on one node), or change tp"),
        (
            "--shard 2 --pp 2 --procs 2",
            "plan-size",
            "start 4 processes (`--procs 4` on one node), or change pp or shard",
        ),
        ("--shard 2 --zero 0 --procs 2", "plan-zero", "set zero to 1, 2 or 3, or leave it out"),
        ("--tp 3 --procs 2 --dry-run", "plan-size", "start 3 processes (`--procs 3` on one node), or change tp"),
    ],
)
def test_a_plan_that_does_not_divide_the_processes_starts_none(words, code, fix, folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch_command, "carry_out", lambda *job: pytest.fail("nothing may be started"))
    assert main(["launch", "--cpu", *words.split(), "train.py"]) == 1
    text = capsys.readouterr().err
    assert f"[{code}]" in text and f"  fix: {fix}" in text


@pytest.mark.parametrize("words", ["--tp 2 --procs 4", "--zero 2 --procs 2", "--zero 3", "--tp auto --procs 3", "--procs 2",
                                   "--tp 3 --nodes 2:4 --main-address localhost --procs 2"])  # fmt: skip
def test_plans_that_fit_are_started(words, folder, monkeypatch) -> None:
    monkeypatch.setattr(launch_command, "carry_out", lambda *job: 17)
    assert main(["launch", "--cpu", *words.split(), "train.py"]) == 17


@pytest.mark.needs("lens")
@pytest.mark.parametrize("name", ["foo", "v100-32GB", "h2000", "mine-24GB"])
def test_an_unknown_device_is_an_error(name, folder, capsys) -> None:
    assert main(["plan", "--device", name, "train.py"]) == 2
    text = capsys.readouterr().err
    memory = name.partition("-")[2] or "24GB"
    assert "[plan-device]" in text and "known: a100-40GB, a100-80GB, h100-80GB" in text
    assert f"with the memory of yours, such as a100-{memory}" in text
