"""Flags of torchrun, accelerate, DeepSpeed and Lightning: taken, or answered with the flag of ours."""

from __future__ import annotations

import argparse
import os

import pytest

from paceline.base import parts
from paceline.base.errors import ConfigError
from paceline.config import schema
from paceline.config.sources import Launch, resolve_launch
from paceline_accelerate import deepspeed_words


def told(text: str) -> Launch:
    parser = argparse.ArgumentParser()
    schema.add_options(parser)
    return resolve_launch(schema.given(parser.parse_args(text.split())), {}, search=False)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--nproc-per-node 2", {"procs": 2}),
        ("--nproc_per_node=gpu", {"procs": "auto"}),
        ("--nproc_per_node auto", {"procs": "auto"}),
        ("--nproc-per-node cpu", {"procs": os.cpu_count()}),
        ("--gpus 4", {"procs": 4}),
        ("--gpus 0,2", {"gpu_ids": "0,2"}),
        ("-np 3", {"procs": 3}),
        ("--num_gpus -1", {"procs": "auto"}),
        ("--nnodes 1:4", {"nodes": "1:4"}),
        ("--num_nodes 2 --master_addr a --master_port 5", {"nodes": 2, "main_address": "a", "main_port": 5}),
        ("--nnodes=2 --standalone", {"nodes": 1}),
        ("--rdzv-endpoint a:1 --rdzv_backend c10d", {"main_address": "a", "main_port": 1, "rdzv_backend": "c10d"}),
        ("--rdzv_endpoint a", {"main_address": "a", "main_port": 0}),
        ("--rdzv_endpoint [::1]:9", {"main_address": "::1", "main_port": 9}),
        ("--rdzv_endpoint fe80::2", {"main_address": "fe80::2", "main_port": 0}),
        ("--rdzv_endpoint etcd://a:1,b:2", {"store": "etcd://a:1,b:2"}),
        ("--rdzv-id x --rdzv-conf join_timeout=3", {"rdzv_conf": "run_id=x,join_timeout=3"}),
        ("--shutdown-timeout 5", {"grace_s": 5.0}),
        (
            "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip a",
            {"procs": 2, "nodes": 2, "node_rank": 1, "main_address": "a"},
        ),
        pytest.param("--zero_stage 2", {"zero": 2}, marks=pytest.mark.needs("deepspeed")),
        pytest.param("--use_deepspeed", {"zero": 2}, marks=pytest.mark.needs("deepspeed")),
        pytest.param(
            "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu",
            {"zero": 3, "offload": "optimizer"},
            marks=pytest.mark.needs("deepspeed"),
        ),
    ],
)
def test_what_is_said_in_their_words_is_taken(theirs: str, ours: dict[str, object]) -> None:
    launch = told(theirs)
    assert not launch.notices
    values = {**vars(launch.launch), **vars(launch.run)}
    assert {name: values[name] for name in ours} == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-r 3", "--log-dir DIR --tee 0"),
        ("--local-ranks-filter 0", "--ranks 0,1"),
        ("--numa-binding node", "--bind-cores all"),
        ("--local_addr a", "--main-address"),
        ("--log-line-prefix-template x", "--tee"),  # torch 2.14 and later
        ("--print-completion zsh", "paceline completion"),
        ("--start-method spawn", "leave it out"),
        ("--virtual-local-rank", "accelerator.device"),
    ],
)
def test_what_is_not_the_same_is_answered_with_what_is(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        told(theirs)
    [problem] = caught.value.problems
    assert problem.code == "launcher-flag" and ours in problem.fix and theirs.split()[0] in problem.what


def test_deepspeeds_words_without_its_part_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.PathFinder, "find_spec", lambda *names: None)
    with pytest.raises(ConfigError, match=r"(?s)part-missing.*deepspeed"):
        told("--use_deepspeed")


def test_a_flag_of_deepspeeds_that_asks_for_nothing_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)accelerate-feature.*`--zero 1`, 2 or 3"):
        told("--offload_optimizer_device cpu")


@pytest.mark.parametrize(
    ("theirs", "code", "message"),
    [
        pytest.param(
            "--use_fsdp --use_deepspeed --cpu",
            "accelerate-feature",
            "--use_fsdp and --use_deepspeed",
            marks=pytest.mark.needs("deepspeed"),
        ),
        ("--cpu --multi_gpu", "accelerate-feature", "--cpu and --multi_gpu"),
        ("--dynamo_backend zz", "config-value", "dynamo_backend cannot be 'zz'"),
        ("--num_machines 2", "launch-address", "the machines do not know where they find each other"),
        (
            "--num-machines 2 --machine_rank 0",
            "launch-address",
            "num_machines is 2 (--num-machines), and main_process_ip is not set",
        ),
    ],
)
def test_flags_that_accelerate_refuses_are_refused(theirs: str, code: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        told(theirs)
    [problem] = caught.value.problems
    assert problem.code == code and problem.fix and message in str(problem)


def test_machines_of_a_config_file_need_an_address_too(tmp_path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match=r"num_machines is 2 \(.*two.yaml:2\), and main_process_ip is not set"):
        told(f"--config {path}")
    told(f"--config {path} --main_process_ip a")


@pytest.mark.parametrize(
    "theirs",
    [
        "--nodes 2",
        "--num_machines 1",
        "--num_machines 2 --main_process_ip a",
        "--num_machines 2 --deepspeed_hostfile h",
    ],
)
def test_machines_that_find_each_other_are_accepted(theirs: str) -> None:
    told(theirs)


def test_all_problems_come_at_once_and_wrong_values_name_the_flag_that_was_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        told("-r 3 --nproc-per-node many --start-method fork")
    assert [problem.code for problem in caught.value.problems] == ["launcher-flag", "launcher-flag", "config-value"]
    assert "--nproc-per-node" in str(caught.value)


def test_every_flag_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser()
    schema.add_options(parser)
    theirs = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert theirs <= set(parser._option_string_actions)


def test_every_field_of_accelerates_deepspeed_that_is_a_flag_is_known() -> None:
    fields = {*deepspeed_words.FIELDS, *deepspeed_words.IDLE, *deepspeed_words.VARIABLES}
    assert set(deepspeed_words.FLAGS) <= fields
    assert set(deepspeed_words.FIELDS) - set(deepspeed_words.FLAGS) == {
        "gradient_accumulation_steps",
        "gradient_clipping",
    }


@pytest.mark.needs("deepspeed")
def test_a_deepspeed_config_that_is_called_none_is_none() -> None:
    assert told("--use_deepspeed --deepspeed_config_file none").run.zero == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--config_file ~nobody-here/a.yaml",
        pytest.param("--deepspeed_config_file ~nobody-here/a.json", marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_the_home_of_an_unknown_user(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        told(flags)
    assert caught.value.code == "config-file"


@pytest.mark.needs("deepspeed")
def test_the_words_of_a_command_line_can_be_said_again() -> None:
    parser = argparse.ArgumentParser()
    schema.add_options(parser)
    said = "--rdzv-endpoint a:1 --nproc_per_node gpu --num_machines 2 --cpu --use_deepspeed --zero_stage 1"
    again = " ".join(schema.words(schema.given(parser.parse_args(said.split()))))
    assert told(again).launch == told(said).launch
    assert told(again).run == told(said).run


def test_the_variables_that_kubeflow_gives_to_a_pod() -> None:
    env = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "t-node-0-0.t",
        "PET_MASTER_PORT": "29400",
        "PET_MAX_RESTARTS": "3",
        "PET_SOMETHING": "else",
    }
    launch = resolve_launch((), env, search=False)
    settings = launch.launch
    assert (settings.nodes, settings.procs, settings.node_rank, settings.max_restarts) == (2, 8, 1, 3)
    assert (settings.main_address, settings.main_port) == ("t-node-0-0.t", 29400)
    row = next(row for row in launch.decisions if row.field == "nodes")
    assert (row.source, row.where) == ("environment", "PET_NNODES")
    elastic = {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "t-worker-0:29401", "PET_RDZV_BACKEND": "c10d"}
    settings = resolve_launch((), {**elastic, "PET_NPROC_PER_NODE": "gpu"}, search=False).launch
    assert (settings.nodes, settings.main_address, settings.main_port) == ("1:3", "t-worker-0", 29401)
    assert (settings.rdzv_backend, settings.procs) == ("c10d", "auto")
    assert resolve_launch((), {**env, "PACELINE_NODES": "5"}, search=False).launch.nodes == 5, "ours win"


def test_a_wrong_variable_of_a_pod_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PET_NNODES"):
        resolve_launch((), {"PET_NNODES": "many"}, search=False)
