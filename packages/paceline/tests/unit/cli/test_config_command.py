"""`paceline config`: a few questions, or none, and a file that `launch` reads."""

import sys

import pexpect
import pytest

from paceline.cli import config
from paceline.cli.main import main
from paceline.config import Given, resolve_launch
from paceline.launch.host import Accelerators


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


@pytest.mark.needs("accelerate")
def test_accelerates_file_is_translated(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: a\nmixed_precision: bf16\n"
    )
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
    child.expect(r"This host has (no|\d+) GPU")
    child.expect_exact("cpu [no]: ")
    child.sendline("")
    child.expect_exact("How many GPUs of each host?")
    child.expect_exact("procs [auto]: ")
    child.sendline("many")
    child.expect_exact("expected: a whole number from 1 to 4096, or auto")
    child.expect_exact("procs [auto]: ")
    child.sendline("2")
    child.expect_exact("gpu_ids [all]: ")
    child.sendline("1,3")
    child.expect_exact("mixed_precision [no]: ")
    child.sendline("bf16")
    child.expect_exact("Sharding: ")
    child.expect_exact("zero [auto]: ")
    child.sendline("4")
    child.expect_exact("expected: a whole number from 0 to 3, or auto")
    child.expect_exact("zero [auto]: ")
    child.sendline("3")
    child.expect_exact("shard [auto]: ")
    child.sendline("2")
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
    assert (found.launch.gpu_ids, found.run.cpu, found.run.accumulate) == ("1,3", False, 4)
    assert (found.run.mixed_precision, found.run.zero, found.run.axes["shard"]) == ("bf16", 3, 2)


def test_questions_that_do_not_arise(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("paceline.launch.host.accelerators", lambda: Accelerators("cuda", 2))

    def ask(setting, question):
        asked.append((setting.name, question))
        return setting.default

    monkeypatch.setattr(config, "_ask", ask)
    config._ask_all({"cpu": True, "procs": 2})
    assert [name for name, _ in asked] == ["mixed_precision", "zero", "accumulate", "nodes"]
    asked.clear()
    config._ask_all({"cpu": True})
    assert asked[0] == ("procs", "How many processes on each host? auto: 1.")
    assert "This host has 2 GPUs." in capsys.readouterr().err


def test_the_input_ends_early(talk):
    child, path = talk
    child.expect_exact("cpu [no]: ")
    child.sendeof()
    child.expect_exact("[config-terminal]")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2 and not path.exists()
