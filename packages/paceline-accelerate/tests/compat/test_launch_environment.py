"""`accelerate.utils.launch`: programs that start processes themselves take commands and variables from it."""

from __future__ import annotations

import argparse
import socket

import pytest

from paceline_accelerate import launch_environment as builders
from paceline_accelerate import launcher_variables
from paceline_accelerate.commands.launch import launch_command_parser
from paceline_accelerate.commands.launch_validation import _validate_launch_command
from paceline_accelerate.commands.to_fsdp2 import to_fsdp2_command

TWO_MACHINES = ("--num_machines", "2", "--num_processes", "4", "--machine_rank", "1")
THERE = ("--main_process_ip", "10.0.0.1", "--main_process_port", "1234")


def arguments(*words: str) -> argparse.Namespace:
    return _validate_launch_command(launch_command_parser().parse_args([*words, "train.py", "--lr", "1"]))[0]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path) -> None:
    """No config file of this machine is read, and the usual port seems free."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(builders, "is_port_in_use", lambda port: False)


def test_several_machines_with_deepspeed_are_started_by_its_own_launcher() -> None:
    words = ("--use_deepspeed", *TWO_MACHINES, *THERE, "--deepspeed_hostfile", "hosts")
    command, variables = builders.prepare_deepspeed_cmd_env(arguments(*words))
    assert command is not None and " ".join(command) == (
        "deepspeed --hostfile hosts --no_local_rank --launcher pdsh --num_gpus 2 --master_addr 10.0.0.1 "
        "--master_port 1234 train.py --lr 1"
    )
    assert variables["ACCELERATE_USE_DEEPSPEED"] == "true" and "ACCELERATE_DYNAMO_BACKEND" not in variables
    more = ("--deepspeed_multinode_launcher", "nossh", "--deepspeed_inclusion_filter", "a@0", "--module")
    command, _ = builders.prepare_deepspeed_cmd_env(arguments(*words, *more))
    assert command is not None and " ".join(command[3:9]) == "--node_rank 1 --no_ssh --include a@0 --master_addr"
    assert "--module" in command
    standard = arguments(*words, "--deepspeed_multinode_launcher", "standard")
    assert builders.prepare_deepspeed_cmd_env(standard)[0] is None and standard.nnodes == "2"


def test_machines_need_an_address() -> None:
    with pytest.raises(AssertionError, match="main_process_ip"):
        builders.prepare_simple_launcher_cmd_env(arguments(*TWO_MACHINES))


def test_hosts_of_mpirun_count_without_the_cpu_flag() -> None:
    command, _ = builders.prepare_simple_launcher_cmd_env(
        arguments("--mpirun_hostfile", "hosts", "--num_processes", "2")
    )
    assert command[:7] == ["mpirun", "--hostfile", "hosts", "--npernode", "2", "-n", "2"]


def test_values_are_in_small_letters_and_names_are_not() -> None:
    args = arguments("--use_fsdp", "--num_processes", "2", "--fsdp_state_dict_type", "SHARDED_STATE_DICT")
    args.fsdp_offload_params = True  # as a config file says it
    variables = builders.prepare_multi_gpu_env(args)
    assert (variables["FSDP_OFFLOAD_PARAMS"], variables["FSDP_STATE_DICT_TYPE"]) == ("true", "SHARDED_STATE_DICT")


def test_flags_of_megatron_become_variables() -> None:
    variables = builders.prepare_multi_gpu_env(arguments("--use_megatron_lm", "--megatron_lm_tp_degree", "4"))
    assert variables["ACCELERATE_USE_MEGATRON_LM"] == "true"
    assert (variables["MEGATRON_LM_TP_DEGREE"], variables["MEGATRON_LM_PP_DEGREE"]) == ("4", "1")
    assert "MEGATRON_LM_NUM_MICRO_BATCHES" not in variables


@pytest.mark.parametrize(
    "name", ["prepare_simple_launcher_cmd_env", "prepare_multi_gpu_env", "prepare_deepspeed_cmd_env"]
)
def test_8_bits_without_a_library_for_them_are_refused(name: str, monkeypatch) -> None:
    monkeypatch.setattr("paceline_accelerate.launch_environment.is_fp8_available", lambda: False)
    with pytest.raises(RuntimeError, match="FP8 is not available"):
        getattr(builders, name)(arguments("--mixed_precision", "fp8"))


def test_a_port_that_is_in_use(monkeypatch) -> None:
    monkeypatch.undo()
    with socket.create_server(("localhost", 0)) as server:
        port = ("--main_process_port", str(server.getsockname()[1]))
        args = arguments("--num_processes", "2", *port)
        with pytest.warns(UserWarning, match="listens on port"):
            builders.prepare_multi_gpu_env(args)
        assert args.standalone
        leader = arguments(
            "--num_machines", "2", "--num_processes", "4", "--machine_rank", "0", "--main_process_ip", "a", *port
        )
        with pytest.raises(ConnectionError, match="listens on port"):
            builders.prepare_multi_gpu_env(leader)


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
    actions = {action.dest: action.option_strings for action in launch_command_parser()._actions}
    assert actions["module"][:2] == ["-m", "--module"]


def test_keys_of_a_block_may_have_the_whole_name_of_the_flag(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: fp8\nnum_processes: 2\nnum_machines: 1\n"
        "fp8_config: {fp8_format: E4M3, margin: 2}\nfsdp_config: {version: 2}\n"
    )
    args = arguments("--config_file", str(file))
    assert (args.fp8_format, args.fp8_margin, args.fsdp_version) == ("E4M3", 2, 2)
    with pytest.raises(ValueError, match="Less than two GPU ids"):
        arguments("--config_file", str(file), "--gpu_ids", "3")
    assert arguments("--config_file", str(file), "--gpu_ids", "3,4").gpu_ids == "3,4"


def test_a_converted_config_does_not_replace_a_file(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("fsdp_config: {fsdp_version: 1}\n")
    args = argparse.Namespace(config_file=str(file), overwrite=False, output_file=str(file))
    with pytest.raises(FileExistsError, match="already exists"):
        to_fsdp2_command(args)
