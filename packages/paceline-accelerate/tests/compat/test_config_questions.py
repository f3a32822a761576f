"""`accelerate config` asks on a terminal and from a pipe. `test_commands` compares its files with those of the real one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pexpect
import pytest
import yaml

from paceline import ConfigError
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline_accelerate.commands import accelerate_cli
from paceline_accelerate.commands.config import menu, questions
from paceline_accelerate.commands.config.ask import ask

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_questions.json").read_text(encoding="utf-8"))
PROGRAM = "from paceline_accelerate.commands.accelerate_cli import main; raise SystemExit(main())"


OF_DEEPSPEED = pytest.mark.needs("deepspeed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[OF_DEEPSPEED] if "DeepSpeed" in name or name == "yes everywhere" else [])
        for name, (_, text) in RECORDED.items()
        if text
    ],
)
def test_every_file_is_accepted_by_launch_or_refused_by_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / ("a.json" if name == "JSON" else "a.yaml")
    file.write_text(RECORDED[name][1])
    given = [Given("config", str(file), "command line", "--config_file")]
    refusals = {
        "DeepSpeed from a file": "ds.json is no string path",
        "yes everywhere": "the DeepSpeed config yes is no string path",
    }
    if name in refusals:
        with pytest.raises(ConfigError, match=refusals[name]):
            resolve_launch(given, {})
    else:
        resolve_launch(given, {})


def answered(monkeypatch, path: Path, text: str) -> int:
    """Runs `accelerate config` with answers from a pipe; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["accelerate", "config", "--config_file", str(path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return accelerate_cli.main()


def test_answers_from_a_pipe(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "a.yaml"
    assert answered(monkeypatch, file, "\n" * 20) == 0
    assert file.read_text() == RECORDED["nothing"][1]
    # A choice of a menu is given by its number.
    assert answered(monkeypatch, file, "\n40\nGPU\n4\n\n\n\n\n\n\n2\n\n\n2\n") == 0
    config = yaml.safe_load(file.read_text())
    assert (config["distributed_type"], config["num_processes"], config["mixed_precision"]) == ("MULTI_GPU", 2, "bf16")
    said = capsys.readouterr().out
    assert "'40' cannot be read; expected: a number from 0 to 10." in said and "'GPU' cannot be read" in said


def test_answers_that_end_early_leave_the_file_as_it_was(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: 'NO'\n")
    assert answered(monkeypatch, file, "0\n0\nyes\n") == 2
    error = capsys.readouterr().err
    assert "config-terminal" in error and "accelerate config default" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
    assert file.read_text() == "distributed_type: 'NO'\n"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("1", "compute_environment AMAZON_SAGEMAKER is not supported"),
        (" 10", "tpu is not supported"),
        (" 4      yes", "use_megatron_lm is not supported"),
        (" 9    yes", "DEEPSPEED is not supported on Neuron devices"),
        (" 9     yes", "FSDP is not supported on Neuron devices"),
        (" 4       ", "num_processes cannot be 1 for several GPUs"),
        ("       3", "mixed_precision fp8 needs torchao"),
    ],
)
def test_what_cannot_be_had_is_refused_at_its_question(
    answers: str, message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("paceline_accelerate.commands.config.questions.is_fp8_available", lambda: False)
    file = tmp_path / "a.yaml"
    assert answered(monkeypatch, file, answers.replace(" ", "\n") + "\n") == 2
    error = capsys.readouterr().err
    assert message in error and "fix:" in error and "Traceback" not in error
    assert not file.exists()


def test_questions_that_do_not_arise_on_apples_chips(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 20))
    answers = ask(questions.CLUSTER, {"_mps": True})
    assert "_deepspeed" not in answers and "gpu_ids" not in answers and "enable_cpu_affinity" not in answers
    assert answers["mixed_precision"] == "no"


def test_a_backend_without_accelerates_misprint(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\nyes\n11\n" + "\n" * 20))
    config = questions.cluster_config(ask(questions.CLUSTER, {"_mps": False}))
    assert config.dynamo_config == {"dynamo_backend": "TORCHXLA_TRACE_ONCE"}


def test_the_default_file_is_yaml_also_beside_one_in_json() -> None:
    from paceline_accelerate.commands.config import config_args

    assert config_args.default_yaml_config_file == f"{config_args.cache_dir}/default_config.yaml"


def spawned(file: Path) -> pexpect.spawn:
    words = ["-c", PROGRAM, "config", "--config_file", str(file)]
    child = pexpect.spawn(sys.executable, words, timeout=30, encoding="utf-8")
    child.expect_exact("> 0  on this machine")
    return child


def test_keys_of_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    child = spawned(file)
    child.send("\r")
    child.expect_exact("> 0  one process")
    child.send("\033[B")
    child.expect_exact("> 1  multi-CPU")
    child.send("9\033OA\033[6~\r\n")  # to 9, one up, a key that does nothing
    child.expect_exact("Number of machines [1]: ")
    child.send("two\n")
    child.expect_exact("'two' cannot be read; expected: a whole number.")
    child.expect_exact("Number of machines [1]: ")
    for _ in range(5):
        child.send("\n")
    child.expect_exact("one for each device [1]: ")
    child.send("2\n\n")
    child.expect_exact("> 0  no")
    child.send("2\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    config = yaml.safe_load(file.read_text())
    assert (config["distributed_type"], config["num_processes"], config["mixed_precision"]) == ("MULTI_MUSA", 2, "bf16")


def test_ctrl_c_in_a_menu_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: 'NO'\n")
    child = spawned(file)
    child.send("\003")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130 and "Traceback" not in child.before
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
    assert file.read_text() == "distributed_type: 'NO'\n"


def test_a_notebook_of_colab_gives_whole_lines(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert menu._has_keys()
    monkeypatch.setattr(menu.importlib.util, "find_spec", lambda name: name)
    assert not menu._has_keys()
