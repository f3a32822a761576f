"""Doors are put into an environment whole or not at all, and leave no trace; the real library comes back as it was."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from paceline import CompatError
from paceline.cli.main import main
from paceline_doors import doors
from paceline_doors.door_files import Door
from paceline_doors.environments import Environment

LIBRARIES = pytest.mark.parametrize(
    "library",
    [
        pytest.param("accelerate", marks=pytest.mark.needs("accelerate")),
        pytest.param("deepspeed", marks=pytest.mark.needs("deepspeed")),
    ],
)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An empty environment that has paceline."""
    packages, scripts = tmp_path / "lib" / "site-packages", tmp_path / "bin"  # whose commands are found first
    packages.mkdir(parents=True)
    scripts.mkdir()
    _install(packages, "paceline", "0.1.0", {"_paceline.pth": "/somewhere\n"})
    return Environment(packages, scripts, Path(sys.executable), (str(scripts), str(tmp_path), str(packages)))


def _install(packages: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Writes a distribution as pip does."""
    metadata = f"{name}-{version}.dist-info"
    files = {**files, f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
             f"{metadata}/INSTALLER": "pip\n"}  # fmt: skip
    record = [f"{path},,\n" for path in (*files, f"{metadata}/RECORD")]
    for path, text in {**files, f"{metadata}/RECORD": "".join(record)}.items():
        file = packages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _install_real(environment: Environment) -> None:
    # The environment's own path may have our name in it.
    command = "#!/home/me/paceline-env/bin/python\nreal\n"
    files = {"accelerate/__init__.py": "REAL = 1\n", "accelerate/utils/x.py": "", "../../bin/accelerate": command}
    _install(environment.packages, "accelerate", "1.15.0", files)
    compiled = environment.packages / "accelerate" / "__pycache__" / "__init__.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled later, and in no RECORD")


def tree(environment: Environment) -> dict[str, bytes | None]:
    """Every file and folder, with its bytes and whether it can be executed."""
    root = environment.scripts.parent
    return {
        f"{path.relative_to(root)} {path.stat().st_mode:o}": path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def codes(error: pytest.ExceptionInfo[CompatError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


# -- in and out ----------------------------------------------------------------------------------------------


@LIBRARIES
def test_a_door_is_removed_without_a_trace(environment: Environment, library: str) -> None:
    before = tree(environment)
    doors.check([library], environment, set_aside=False)
    doors.install(library, environment)
    assert doors.status(library, environment).door.endswith("+paceline")
    (environment.packages / library / "__pycache__").mkdir()  # as Python does
    (environment.packages / library / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"")
    assert doors.remove(library, environment)
    assert tree(environment) == before
    assert not doors.remove(library, environment)


@LIBRARIES
def test_every_command_names_a_function(library: str) -> None:
    commands: dict[str, str] = importlib.import_module(f"paceline_{library}").COMMANDS
    for target in commands.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function, None)), target


@pytest.mark.needs("accelerate")
def test_what_pip_reads(environment: Environment) -> None:
    doors.install("accelerate", environment)
    distribution = environment.installed_door("accelerate")
    assert isinstance(distribution, Distribution) and distribution.version == "1.15.0+paceline"
    assert distribution.metadata["Home-page"] == "https://github.com/huggingface/accelerate"
    assert distribution.read_text("top_level.txt") == "accelerate\n"
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        assert path.is_file(), file
        assert file.hash is None or len(path.read_bytes()) == file.size
    commands = [entry.name for entry in distribution.entry_points]
    assert {"accelerate", "accelerate-launch"} <= set(commands)
    assert all((environment.scripts / name).stat().st_mode & 0o111 for name in commands)


@pytest.mark.needs("accelerate")
def test_installing_twice_is_once(environment: Environment) -> None:
    before = tree(environment)
    for _ in range(2):
        doors.check(["accelerate"], environment, set_aside=False)
        doors.install("accelerate", environment)
    doors.remove("accelerate", environment)
    assert tree(environment) == before


@pytest.mark.needs("accelerate")
def test_dry_run_lists_what_is_written(environment: Environment) -> None:
    _install_real(environment)
    lines = doors.planned("accelerate", environment, set_aside=True)
    moved = [line for line in lines if line.startswith("set aside")]
    assert len(moved) == 3 and str(environment.packages / "accelerate") in moved[0]
    assert len(lines) == len(moved) + len(environment.door("accelerate").files)


@pytest.mark.needs("accelerate")
def test_a_blank_in_the_path_of_the_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    door = Door("deepspeed", tmp_path, tmp_path / "bin", python)
    script = tmp_path / "command"
    script.write_bytes(door.files["bin/deepspeed"].replace(b"from paceline", b"def main(): print(7)\n#"))
    script.chmod(0o755)
    assert subprocess.run([script], capture_output=True, text=True, check=True).stdout == "7\n"


# -- beside the real library ---------------------------------------------------------------------------------


@pytest.mark.needs("accelerate")
def test_a_real_library_is_set_aside_and_brought_back(environment: Environment) -> None:
    _install_real(environment)
    before = tree(environment)
    with pytest.raises(CompatError, match="--set-aside") as error:
        doors.check(["accelerate"], environment, set_aside=False)
    assert codes(error) == ["door-real"]
    doors.check(["accelerate"], environment, set_aside=True)
    doors.install("accelerate", environment, set_aside=True)
    status = doors.status("accelerate", environment)
    assert (status.set_aside, status.real, status.interrupted) == ("1.15.0", "", False)
    doors.install("accelerate", environment)  # a newer paceline: the real one stays aside
    assert doors.status("accelerate", environment).set_aside == "1.15.0"
    doors.remove("accelerate", environment)
    assert tree(environment) == before


@pytest.mark.needs("accelerate")
def test_after_pip_uninstall_the_real_library_still_comes_back(environment: Environment) -> None:
    _install_real(environment)
    before = tree(environment)
    doors.install("accelerate", environment, set_aside=True)
    for file in environment.installed_door("accelerate").files:
        (environment.packages / file).unlink()
    assert doors.status("accelerate", environment).set_aside == "1.15.0"
    doors.remove("accelerate", environment)
    assert tree(environment) == before


@pytest.mark.needs("accelerate")
def test_a_real_library_that_was_installed_again_is_not_overwritten(environment: Environment) -> None:
    _install_real(environment)
    doors.install("accelerate", environment, set_aside=True)
    for file in environment.installed_door("accelerate").files:
        (environment.packages / file).unlink()
    _install_real(environment)
    with pytest.raises(CompatError, match="stands in its place") as error:
        doors.remove("accelerate", environment)
    assert codes(error) == ["door-set-aside"]
    assert (environment.packages / "accelerate" / "__init__.py").read_text() == "REAL = 1\n"


def test_a_library_without_a_list_of_its_files(environment: Environment) -> None:
    _install_real(environment)
    (environment.packages / "accelerate-1.15.0.dist-info" / "RECORD").unlink()
    with pytest.raises(CompatError, match="does not say which files"):
        doors.check(["accelerate"], environment, set_aside=True)


def test_a_checkout_in_front_would_be_imported_instead(environment: Environment) -> None:
    checkout = Path(environment.search[1]) / "accelerate"
    checkout.mkdir()
    with pytest.raises(CompatError, match="belongs to no distribution") as error:
        doors.check(["accelerate"], environment, set_aside=True)
    assert codes(error) == ["door-real"]


@pytest.mark.needs("accelerate")
def test_a_real_library_in_another_folder(environment: Environment, tmp_path: Path, monkeypatch, capsys) -> None:
    behind = tmp_path / "system"
    _install(behind, "accelerate", "1.2.0", {"accelerate/__init__.py": ""})
    later = Environment(
        environment.packages, environment.scripts, environment.python, (*environment.search, str(behind))
    )
    doors.check(["accelerate"], later, set_aside=False)  # the door is found first
    first = Environment(
        environment.packages, environment.scripts, environment.python, (str(behind), *environment.search)
    )
    with pytest.raises(CompatError, match="searched before"):
        doors.check(["accelerate"], first, set_aside=True)
    doors.install("accelerate", environment)
    for searched, message in ((later, "there is also the real one, 1.2.0"), (first, "but the real one comes first")):
        monkeypatch.setattr(Environment, "active", lambda searched=searched: searched)
        assert main(["doors", "status", "accelerate"]) == 0
        assert message in capsys.readouterr().out


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("number", range(14))
def test_an_interrupted_installation_leaves_nothing(environment: Environment, number: int, monkeypatch) -> None:
    """Whatever file it is stopped at: by an exception it cleans up itself, by a kill the next command does."""
    _install_real(environment)
    before = tree(environment)
    rename = Path.rename
    count = iter(range(1000))

    def fail(self: Path, target: Path) -> Path:
        if next(count) == number:
            raise OSError(28, "No space left on device", str(target))
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(CompatError, match="No space left on device") as error:
            doors.install("accelerate", environment, set_aside=True)
    assert codes(error) == ["door-files"]
    assert tree(environment) == before

    with monkeypatch.context() as killed:
        count = iter(range(1000))
        killed.setattr(Path, "rename", fail)
        killed.setattr(doors, "_undo", lambda *args: None)
        with pytest.raises(CompatError):
            doors.install("accelerate", environment, set_aside=True)
    if tree(environment) != before:
        doors.remove("accelerate", environment)
    assert tree(environment) == before


def test_environments_that_take_no_doors(environment: Environment, monkeypatch) -> None:
    owned = Environment(
        environment.packages, environment.scripts, environment.python, environment.search, "apt owns it"
    )
    with pytest.raises(CompatError, match="apt owns it") as error:
        doors.check(["accelerate"], owned, set_aside=False)
    assert codes(error) == ["door-environment"]
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *args: False)
        with pytest.raises(CompatError, match="may not write to"):
            doors.check(["accelerate"], environment, set_aside=False)
    for path in (environment.packages / "paceline-0.1.0.dist-info").iterdir():
        path.unlink()
    (environment.packages / "paceline-0.1.0.dist-info").rmdir()
    with pytest.raises(CompatError, match="paceline itself is not installed"):
        doors.check(["accelerate"], environment, set_aside=False)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.needs("accelerate", "deepspeed")
def test_the_command(environment: Environment, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Environment, "active", lambda: environment)
    before = tree(environment)
    assert main(["doors", "status"]) == 0
    assert "accelerate: not installed" in capsys.readouterr().out
    assert main(["doors", "install", "accelerate", "deepspeed", "--dry-run"]) == 0
    assert "RECORD" in capsys.readouterr().out and tree(environment) == before
    assert main(["doors", "install", "accelerate", "deepspeed"]) == 0
    assert main(["doors", "status", "--json"]) == 0
    assert '"door": "0.19.8+paceline"' in capsys.readouterr().out
    assert main(["doors", "remove"]) == 0
    assert tree(environment) == before
    assert main(["doors", "remove", "deepspeed"]) == 0
    assert "there is no door" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install"], "needs the name of a library"),
        (["install", "lightning"], "no door for 'lightning'"),
        (["remove", "lightning"], "no door for 'lightning'"),
        (["mend"], "invalid choice"),
    ],
)
def test_slips(words: list[str], message: str, capsys) -> None:
    assert main(["doors", *words]) != 0
    assert message in capsys.readouterr().err
