"""accelerate's commands, config classes and plugins answer as the real ones did when they were recorded."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from paceline import CompatError
from paceline.cli.main import main as command_line
from paceline.cli.main import parser_for
from paceline.compat import install
from paceline.config.given import Given
from paceline.config.sources import resolve_launch, resolve_run
from paceline_accelerate import launcher_variables
from paceline_accelerate.commands import estimate, launch, to_fsdp2
from paceline_accelerate.commands.config.update import update_config
from paceline_accelerate.fsdp import said_by
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_commands.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True, scope="module")
def served():
    """accelerate's names are served, and nobody's own config file is there, for the length of this module."""
    finders, modules, path, env = list(sys.meta_path), set(sys.modules), list(sys.path), dict(os.environ)
    for name in [each for each in os.environ if each.startswith(("OMP_", "ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    yield
    sys.meta_path[:], sys.path[:] = finders, path
    os.environ.clear()
    os.environ.update(env)
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("accelerate", "commands_program", "questions_program"):
            del sys.modules[name]


@pytest.mark.parametrize("function", sorted(RECORDED))
def test_as_recorded(function: str) -> None:
    import commands_program

    from paceline_accelerate.commands.config import config_args

    answer = json.dumps(getattr(commands_program, function)())
    # torch's own policy has this field from 2.15 on; the answers were recorded under 2.13.
    answer = answer.replace(", param_dtype_override_fn=None", "")
    folder = os.path.dirname(config_args.cache_dir)
    assert json.loads(answer.replace(folder, "HF_HOME")) == RECORDED[function]


def test_the_same_answers_give_the_same_config_file(tmp_path: Path, monkeypatch) -> None:
    import questions_program

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("paceline_accelerate.commands.config.questions.is_fp8_available", lambda: False)
    recorded = json.loads((REFERENCE / "recorded_questions.json").read_text(encoding="utf-8"))
    assert questions_program.everything() == recorded


# -- launch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", launch.flags(), ids=lambda flag: flag.name)
def test_paceline_launch_knows_every_flag(flag: launch.LaunchFlag) -> None:
    """It has an effect, or is refused by name; none is taken for the script's own."""
    known = parser_for("launch").options
    by_prefix = flag.name.startswith(("megatron_lm_", "fp8_", "aws_", "tpu_"))
    assert f"--{flag.name}" in known or by_prefix, "add it to `dialect.py` or to `engine_fields.py`"
    if flag.short:
        assert flag.short in known


def test_a_namespace_becomes_the_same_command_line() -> None:
    parser = launch.launch_command_parser()
    words = [
        "--num_processes",
        "2",
        "--cpu",
        "--fsdp_min_num_params",
        "5",
        "--mixed_precision",
        "bf16",
        "train.py",
        "--lr",
        "1",
    ]
    args = parser.parse_args(words)
    again = parser.parse_args(launch.words_of(args))
    assert vars(again) == vars(args)
    args.training_script, args.num_machines = "other.py", 1  # as trl's own command does
    assert launch.words_of(args)[-3:] == ["other.py", "--lr", "1"] and "--num_machines" in launch.words_of(args)


def test_what_the_launcher_hands_on(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
                    "  fsdp_cpu_ram_efficient_loading: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n")  # fmt: skip
    given = [Given("config", str(file), "command line", "--config_file")]
    variables = resolve_launch(given, {}).hand_over()
    assert variables["ACCELERATE_USE_FSDP"] == "true" and variables["FSDP_VERSION"] == "2"
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "false" and variables["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in variables, (
        "transformers would load nothing on all ranks but the first"
    )
    run = resolve_run(env=variables)
    assert run.settings.zero == 3 and run.settings.options["shard"]["reshard"] == "no" and not run.notices
    assert not any(name.startswith(("FSDP_", "ACCELERATE_")) for name in resolve_launch([], {}).hand_over())


def test_a_plugin_says_what_was_said_alone() -> None:
    assert said_by(FullyShardedDataParallelPlugin()) == [], "a default must not win over a flag of the launcher"
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")
    plugin.cpu_offload = True
    assert {given.name: given.value for given in said_by(plugin)} == {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
    }


def test_a_list_of_classes_is_said_in_the_words_of_fsdp2() -> None:
    from paceline_accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    block = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_transformer_layer_cls_to_wrap": ["Block"]}
    converted = convert_config_to_fsdp2({"fsdp_config": block})["fsdp_config"]
    assert converted == {
        "fsdp_reshard_after_forward": False,
        "fsdp_transformer_layer_cls_to_wrap": ["Block"],
        "fsdp_version": 2,
    }


def test_a_config_that_is_missing_cannot_be_converted(tmp_path: Path) -> None:
    words = ["--config_file", str(tmp_path / "missing.yaml"), "--output_file", str(tmp_path / "out.yaml")]
    with pytest.raises(FileNotFoundError, match="not found"):
        to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args(words))


def test_a_script_finds_the_variables_that_accelerate_always_sets(monkeypatch) -> None:
    for name in launcher_variables._DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    exported: dict[str, str] = {}
    monkeypatch.setattr(launcher_variables.environment, "export", exported.update)
    monkeypatch.setenv("PACELINE_CPU", "yes")
    launcher_variables.export_settings()
    assert exported == {"ACCELERATE_USE_CPU": "True"}, "accelerate's launcher did not start it"
    monkeypatch.setenv("PACELINE_COMPAT", "deepspeed,accelerate")
    launcher_variables.export_settings()
    assert exported["ACCELERATE_MIXED_PRECISION"] == "no" and exported["ACCELERATE_DYNAMO_MODE"] == "default"
    assert "ACCELERATE_DYNAMO_BACKEND" not in exported, "its value stays"


def test_the_longer_name_of_a_flag_comes_last_as_in_help_texts() -> None:
    actions = {action.dest: action.option_strings for action in launch.launch_command_parser()._actions}
    assert actions["module"][:2] == ["-m", "--module"]


def test_a_converted_config_does_not_replace_a_file(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("fsdp_config: {fsdp_version: 1}\n")
    args = argparse.Namespace(config_file=str(file), overwrite=False, output_file=str(file))
    with pytest.raises(FileExistsError, match="already exists"):
        to_fsdp2.to_fsdp2_command(args)


# -- estimate-memory -----------------------------------------------------------------------------------------


def test_memory_of_a_local_model(tmp_path: Path, capsys) -> None:
    from transformers import BertConfig

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=1000
    )
    config.save_pretrained(tmp_path)
    args = estimate.estimate_command_parser().parse_args([str(tmp_path / "config.json"), "--dtypes", "float32", "int4"])
    # As the real one says of the same config.
    training = {"model": 680704, "optimizer": 1361408, "gradients": 680704, "step": 2722816}
    rows = estimate.gather_data(args)
    assert rows[0] == ["float32", 396288, 680704, training] and rows[1][:3] == ["int4", 49536, 85088]
    estimate.estimate_command(args)
    assert "664.75 KB" in capsys.readouterr().out


def test_a_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(model_name="nobody/nothing", library_name=None, trust_remote_code=False, dtypes=["int8"])
    with pytest.raises(OSError) as error:  # the class that accelerate raises
        estimate.gather_data(args)
    assert isinstance(error.value, CompatError) and error.value.code == "compat-model"
    monkeypatch.setattr(estimate, "find_spec", lambda name: None)
    args.library_name = "timm"
    with pytest.raises(ImportError) as missing:
        estimate.gather_data(args)
    assert isinstance(missing.value, CompatError) and missing.value.code == "compat-model"


def test_a_config_file_that_is_named_for_an_update_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no config file"):
        update_config(argparse.Namespace(config_file=str(tmp_path / "none.yaml")))


# -- tpu-config ----------------------------------------------------------------------------------------------


def test_flags_of_tpus_are_refused(capsys) -> None:
    assert command_line(["launch", "--env", "A=1", "train.py"]) == 2
    assert "env A=1 is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "gcloud"),
    [
        ("--tpu_name n --tpu_zone z --command ls --command pwd", "gcloud|n --zone z|ls; pwd"),
        ("--tpu-name n --tpu_zone z --command_file {folder}/commands --use_alpha", "gcloud alpha|n --zone z|date; ls"),
        ("--config_file {folder}/tpu.yaml", "gcloud|from --zone file|pwd"),
        ("--config_file {folder}/tpu.yaml --tpu_name n --command ls", "gcloud|n --zone file|ls"),
        (
            "--config_file {folder}/tpu.yaml --install_accelerate",
            "gcloud|from --zone file|{install}; pwd",
        ),
    ],
)
def test_commands_for_a_tpu_pod(words: str, gcloud: str, tmp_path: Path, capsys) -> None:
    from paceline_accelerate.commands import tpu

    (tmp_path / "commands").write_text("date\nls\n")
    config = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\ntpu_name: from\ntpu_zone: file\ncommands: [pwd]\n"
    )
    (tmp_path / "tpu.yaml").write_text(config)
    parser = tpu.tpu_command_parser()
    tpu.tpu_command_launcher(parser.parse_args([*words.format(folder=tmp_path).split(), "--debug"]))
    program, place, commands = gcloud.split("|")
    commands = commands.format(install="pip install accelerate -U")
    expected = f"Running {program} compute tpus tpu-vm ssh {place} --command cd /usr/share; {commands} --worker all\n"
    assert capsys.readouterr().out == expected
    for incomplete in (["--tpu_name", "n", "--tpu_zone", "z"], ["--tpu_name", "n", "--command", "ls"]):
        with pytest.raises(ValueError, match=r"must specify|not known"):
            tpu.tpu_command_launcher(parser.parse_args([*incomplete, "--debug"]))
