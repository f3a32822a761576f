"""`accelerate.utils.launch`: makes the commands and the environment variables that accelerate's launcher starts processes with.

`accelerate launch` runs `paceline launch` here and needs none of this. The functions are for programs that start processes
themselves, and that take the result of `accelerate launch`'s parser.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.base import env as environment
from paceline_accelerate.available import is_fp8_available
from paceline_accelerate.deepspeed_words import VARIABLES as DEEPSPEED_VARIABLES
from paceline_accelerate.engine_fields import ROWS
from paceline_accelerate.kinds import DistributedType, DynamoBackend, PrecisionType, text_of
from paceline_accelerate.surroundings import is_port_in_use
from paceline_accelerate.word_lists import DEEPSPEED_MULTINODE_LAUNCHERS

_log = logging.getLogger("accelerate.utils.environment")
_USUAL_PORT = 29500
# Arguments `fp8_*` that have one value, without this prefix.
_FP8 = (
    "backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo opt_level "
    "enable_fsdp_float8_all_gather pad_inner_dim"
)
# Flags whose values keep their capital letters as variables.
_AS_WRITTEN = (
    "fsdp_sharding_strategy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch "
    "fsdp_state_dict_type fsdp_ignored_modules deepspeed_config_file deepspeed_moe_layer_cls_names "
    "offload_optimizer_nvme_path offload_param_nvme_path"
)
# A shell, or whatever reads the file `.deepspeed_env`, would not take these characters as part of a value.
_FORBIDDEN = (";", "\n", "<", ">", " ")


# -- parts of an environment ---------------------------------------------------------------------------------


def _common_variables(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables that every way of starting processes sets.

    Raises:
        ValueError: flags that do not go together, or an unknown precision or compile backend.
        RuntimeError: 8-bit arithmetic is asked for, and no library for it is there.
    """
    if args.module and args.no_python:
        raise ValueError("--module and --no_python cannot be used together")
    precision = (args.mixed_precision or "no").lower()
    backend = (args.dynamo_backend or "no").upper()
    _check_member(PrecisionType, precision, "mixed_precision mode")
    _check_member(DynamoBackend, backend, "dynamo backend")
    variables = {"ACCELERATE_MIXED_PRECISION": precision}
    if args.debug:
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if args.gpu_ids not in (None, "all"):
        variables["CUDA_VISIBLE_DEVICES"] = args.gpu_ids
    if args.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    if precision == "fp8":
        if not is_fp8_available():
            raise RuntimeError(
                "FP8 is not available on this machine: torchao is not installed. Use --mixed_precision bf16."
            )
        setup_fp8_env(args, variables)
    return variables


def _compile_variables(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of `torch.compile`, which DeepSpeed's processes do not get: its config has a key for it."""
    variables = {
        "ACCELERATE_DYNAMO_BACKEND": (args.dynamo_backend or "no").upper(),
        "ACCELERATE_DYNAMO_MODE": args.dynamo_mode,
    }
    for name in ("fullgraph", "dynamic", "regional_compilation"):
        variables[f"ACCELERATE_DYNAMO_USE_{name.upper()}"] = str(getattr(args, f"dynamo_use_{name}"))
    return variables


def _check_member(enumeration: Any, word: str, name: str) -> None:
    """Raises a ValueError for a word that is no value of an enumeration."""
    if word not in enumeration:
        raise ValueError(f"Unknown {name}: {word}. Choose between {enumeration.list()}.")


def _command(args: argparse.Namespace) -> list[str]:
    """Returns the command of one process."""
    command = [] if args.no_python else [sys.executable]
    if args.module:
        command.append("-m")
    return [*command, args.training_script, *args.training_script_args]


# -- the builders --------------------------------------------------------------------------------------------


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of one process, or of several through mpirun.

    Raises:
        ValueError: flags that do not go together, or an unknown precision or compile backend.
        RuntimeError: 8-bit arithmetic is asked for, and no library for it is there.
        AssertionError: several machines without an address or a port.
    """
    variables = _common_variables(args) | _compile_variables(args)
    command = _command(args)
    on_cpu = getattr(args, "use_cpu", args.cpu)
    variables["OMP_NUM_THREADS"] = str(args.num_cpu_threads_per_process)
    variables["ACCELERATE_USE_CPU"] = str(on_cpu or False)
    num_processes = args.num_processes or 1
    num_machines = args.num_machines or 1
    if num_machines > 1 and None in (args.main_process_ip, args.main_process_port):
        raise AssertionError(
            "several machines need --main_process_ip and --main_process_port, the address of machine 0"
        )
    if num_processes > 1 or num_machines > 1:
        variables["MASTER_ADDR"] = args.main_process_ip or "127.0.0.1"
        variables["MASTER_PORT"] = str(_port(args.main_process_port))
    if on_cpu:
        # With these Intel's OpenMP binds threads to cores, and idle threads sleep after a millisecond.
        variables |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    if args.mpirun_hostfile is not None:
        hosts = ["--hostfile", args.mpirun_hostfile, "--npernode", str(max(num_processes // num_machines, 1))]
        count = ["-n", str(num_processes)] if args.num_processes else []
        command = ["mpirun", *hosts, *count, "--bind-to", "socket", *command]
    return command, environment.snapshot() | variables


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of processes that torchrun starts, and sets torchrun's own arguments in `args`.

    Raises:
        ValueError, RuntimeError: as `prepare_simple_launcher_cmd_env`.
        ConnectionError: several machines, and another process of this one listens on the port.
    """
    variables = _common_variables(args) | _compile_variables(args)
    variables["OMP_NUM_THREADS"] = str(args.num_cpu_threads_per_process)
    _set_torchrun_arguments(args)
    if args.use_fsdp:
        variables["ACCELERATE_USE_FSDP"] = "true"
        variables |= _fsdp_variables(args)
    if args.use_megatron_lm:
        variables["ACCELERATE_USE_MEGATRON_LM"] = "true"
        for name, value in vars(args).items():
            if name.startswith("megatron_lm_") and value is not None:
                variables[name.upper()] = str(value)
    current = environment.snapshot() | variables
    if args.use_parallelism_config:
        return prepare_extend_env_parallelism_config(args, current)
    return current


def _fsdp_variables(args: argparse.Namespace) -> dict[str, str]:
    variables = {}
    for row in ROWS:
        is_fsdp_flag = row.name.startswith("fsdp_") and row.takes is not None
        value = getattr(args, row.name, None) if is_fsdp_flag else None
        if value is not None:
            variables[row.variable] = _text(row.name, value)
    return variables


def _text(name: str, value: object) -> str:
    """Returns the text of a flag's value for a variable: in small letters, except for names of classes, files and choices."""
    text = str(value)
    return text if name in _AS_WRITTEN.split() else text.lower()


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Returns the environment of processes that use DeepSpeed, and the command of its own launcher for several machines.

    The command is None on one machine, and with the launcher "standard": then torchrun starts the processes.

    Raises:
        ValueError, RuntimeError, ConnectionError: as `prepare_multi_gpu_env`.
    """
    command = None
    args.deepspeed_multinode_launcher = args.deepspeed_multinode_launcher or DEEPSPEED_MULTINODE_LAUNCHERS[0]
    if (args.num_machines or 1) > 1 and args.deepspeed_multinode_launcher != "standard":
        command = _deepspeed_command(args)
    variables = _common_variables(args)
    _set_torchrun_arguments(args)
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", "")
    variables["ACCELERATE_CONFIG_DS_FIELDS"] = str(fields).lower()
    for name, variable in DEEPSPEED_VARIABLES.items():
        value = getattr(args, name, None)
        if value is not None:
            variables[variable] = _text(name, value)
    variables["ACCELERATE_USE_DEEPSPEED"] = "true"
    current = environment.snapshot() | variables
    current["PYTHONPATH"] = env_var_path_add("PYTHONPATH", os.path.abspath("."))
    if args.use_parallelism_config:
        current = prepare_extend_env_parallelism_config(args, current)
    return command, current


def _deepspeed_command(args: argparse.Namespace) -> list[str]:
    """Returns the command line of DeepSpeed's launcher, for several machines."""
    command = ["deepspeed", "--hostfile", str(args.deepspeed_hostfile)]
    if args.deepspeed_multinode_launcher == "nossh":
        command += ["--node_rank", str(args.machine_rank), "--no_ssh"]
    else:
        command += ["--no_local_rank", "--launcher", str(args.deepspeed_multinode_launcher)]
    if args.deepspeed_exclusion_filter is not None:
        command += ["--exclude", str(args.deepspeed_exclusion_filter)]
    elif args.deepspeed_inclusion_filter is not None:
        command += ["--include", str(args.deepspeed_inclusion_filter)]
    else:
        command += ["--num_gpus", str(args.num_processes // args.num_machines)]
    if args.main_process_ip:
        command += ["--master_addr", str(args.main_process_ip)]
    command += ["--master_port", str(_port(args.main_process_port))]
    command += [f"--{name}" for name in ("module", "no_python") if getattr(args, name)]
    return [*command, args.training_script, *args.training_script_args]


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the fields of a `ParallelismConfig` to an environment, in place."""
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    names = ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend"]
    if args.parallelism_config_cp_size > 1:
        names.append("cp_comm_strategy")
    if args.parallelism_config_sp_size > 1:
        names += ["sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"]
    for name in names:
        current_env[f"PARALLELISM_CONFIG_{name.upper()}"] = str(getattr(args, f"parallelism_config_{name}"))
    return current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the options of 8-bit arithmetic to an environment, in place. accelerate's recipes read them."""
    for name in _FP8.split():
        value = getattr(args, f"fp8_{name}")
        if value is not None:
            current_env[f"ACCELERATE_FP8_{name.upper()}"] = str(value)
    for name, value in zip(("FPROP", "DGRAD", "WGRAD"), args.fp8_override_linear_precision, strict=True):
        current_env[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return current_env


def _set_torchrun_arguments(args: argparse.Namespace) -> None:
    """Sets torchrun's arguments: the numbers of processes and hosts, and the address where they find each other."""
    machines = args.num_machines or 1
    args.main_process_port = _port(args.main_process_port)
    leads = machines == 1 or int(args.machine_rank) == 0
    if leads and is_port_in_use(args.main_process_port):
        why = f"another process listens on port {args.main_process_port} already"
        if machines > 1:
            raise ConnectionError(f"{why}: pass another --main_process_port, the same one on all machines.")
        warnings.warn(
            f"{why}: torchrun chooses a free one for this run. `--main_process_port 0` does so too.", stacklevel=3
        )
        args.standalone = True
    if machines > 1:
        args.nproc_per_node = str(args.num_processes // machines)
        args.nnodes = str(machines)
        args.node_rank = int(args.machine_rank)
        if getattr(args, "same_network", False):
            args.master_addr = str(args.main_process_ip)
            args.master_port = str(args.main_process_port)
        else:
            args.rdzv_endpoint = f"{args.main_process_ip}:{args.main_process_port}"
    else:
        args.nproc_per_node = str(args.num_processes)
        args.master_port = str(args.main_process_port)


def _port(main_process_port: int | None) -> int:
    """Returns the port of an argument, in which 0 stands for any free one and None for the usual one."""
    if main_process_port is None:
        return _USUAL_PORT
    if main_process_port != 0:
        return main_process_port
    from paceline_accelerate.host import get_free_port

    return get_free_port()


# -- variables and arguments --------------------------------------------------------------------------------------------


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Returns the value of a variable that lists folders, with one more folder at its end."""
    folders = [folder for folder in environment.snapshot().get(env_var_name, "").split(":") if folder]
    return ":".join([*folders, path_to_add])


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Returns a line `NAME=VALUE` for each variable; a warning names those that are left out, which a shell would misread."""
    lines = []
    for name, value in current_env.items():
        has_forbidden = any(character in name + value for character in _FORBIDDEN)
        if has_forbidden or not name or not value:
            _log.warning("Skipping %s=%s as it contains forbidden characters or missing values.", name, value)
            continue
        lines.append(f"{name}={value}\n")
    return lines


class PrepareForLaunch:
    """Calls a function in a process that was forked, after it has set the variables that give the process its rank.

    Args:
        launcher: the function.
        distributed_type: a process gets a rank only for a `MULTI_*` type.
        debug: accepted, and without effect: under accelerate processes find each other through a file then.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.debug = debug
        self.distributed_type = DistributedType(text_of(distributed_type).upper())

    def __call__(self, index: int, *args: Any) -> None:
        """Runs the function as process `index` of this host."""
        variables = {"FORK_LAUNCHED": "1"}
        if self.distributed_type.value.startswith("MULTI_"):
            env = environment.snapshot()
            procs = int(env.get("NPROC", env.get("LOCAL_WORLD_SIZE", "1")))
            first_rank = int(env.get("NODE_RANK", "0")) * procs
            variables |= {"LOCAL_RANK": str(index), "RANK": str(first_rank + index)}
        environment.export(variables)
        self.launcher(*args)


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """Returns the arguments that another parser has: with the values of `args`, or with its own defaults."""
    arguments, _ = parser.parse_known_args(default_args)
    for name in vars(arguments).keys() & vars(args).keys():
        setattr(arguments, name, getattr(args, name))
    return arguments
