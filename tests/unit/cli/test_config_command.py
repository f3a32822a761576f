"""`paceline config`: a few questions, or none, and a file that `launch` reads."""

import sys

import pexpect
import pytest

from paceline.cli.main import main
from paceline.config import Given, resolve_launch


def read(path):
    return resolve_launch([Given("config", str(path), "command line", "--config")], {})


def test_default_asks_nothing(tmp_path, capsys):
    path = tmp_path / "deep" / "run.yaml"
    assert main(["config", "--default", "--output", str(path), "--procs", "2", "--mixed_precision", "bf16"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}\n" and f"--config {path}" in err
    found = read(path)
    assert (found.launch.procs, found.run.mixed_precision, found.run.accumulate) == (2, "bf16", 1)
    assert 'mixed_precision: "bf16"' in path.read_text()


def test_the_default_place(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["config", "--default"]) == 0
    assert (tmp_path / "paceline/config.yaml").is_file()
    assert main(["explain", "--changed"]) == 0
    assert str(tmp_path / "paceline/config.yaml") in capsys.readouterr().out


def test_a_file_is_not_replaced_by_accident(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("tp: 2\n")
    assert main(["config", "--default", "--output", str(path)]) == 2
    assert "[config-exists]" in capsys.readouterr().err and path.read_text() == "tp: 2\n"
    assert main(["config", "--default", "--output", str(path), "--force"]) == 0
    assert "procs" in path.read_text()


def test_accelerates_file_is_translated(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmixed_precision: bf16\n")
    assert main(["config", "--default", "--config", str(old), "--output", str(new)]) == 0
    found = read(new)
    assert (found.launch.procs, found.launch.nodes, found.run.mixed_precision) == (2, 2, "bf16")
    assert "config:" not in new.read_text() and not found.unused


def test_nobody_to_ask(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: SIM115
    try:
        assert main(["config", "--output", str(tmp_path / "run.yaml")]) == 2
    finally:
        sys.stdin.close()
    assert "[config-terminal]" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["config", "--default", "--output", str(tmp_path / "file" / "run.yaml")]) == 2
    assert "[config-write]" in capsys.readouterr().err


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "run.yaml"
    child = pexpect.spawn(
        sys.executable, ["-m", "paceline", "config", "--output", str(path)], timeout=30, encoding="utf-8"
    )
    yield child, path
    child.close(force=True)


def test_questions_and_answers(talk):
    child, path = talk
    child.expect_exact("procs [auto]: ")
    child.sendline("many")
    child.expect_exact("expected: a whole number from 1 to 4096, or auto")
    child.expect_exact("procs [auto]: ")
    child.sendline("2")
    child.expect_exact("cpu [no]: ")
    child.sendline("yes")
    child.expect_exact("mixed_precision [no]: ")
    child.sendline("")
    child.expect_exact("accumulate [1]: ")
    child.sendline("4")
    child.expect_exact("nodes [1]: ")
    child.sendline("2")
    child.expect_exact("main_address [not set]: ")
    child.sendline("node0")
    child.expect_exact("main_port [0]: ")
    child.sendline("29500")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    found = read(path)
    assert (found.launch.procs, found.launch.nodes, found.launch.main_address) == (2, 2, "node0")
    assert (found.run.cpu, found.run.accumulate, found.run.mixed_precision) == (True, 4, "no")


def test_the_input_ends_early(talk):
    child, path = talk
    child.expect_exact("procs [auto]: ")
    child.sendeof()
    child.expect_exact("[config-terminal]")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2 and not path.exists()
