"""accelerate's `utils.launch`: the commands and variables that its launcher would start processes with.

`accelerate launch` itself is `paceline launch` here and needs none of this; these functions are for programs that start
processes on their own and borrow accelerate's words for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.base import env as environment
from paceline.compat.accelerate.engine_fields import FIELDS
from paceline.compat.accelerate.kinds import DistributedType, DynamoBackend, PrecisionType

_log = logging.getLogger(__name__)
_PORT = 29500
_FSDP = (
    "version sharding_strategy reshard_after_forward offload_params min_num_params auto_wrap_policy "
    "transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params "
    "cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload"
)
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_FP8 = (
    "backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo opt_level "
    "enable_fsdp_float8_all_gather pad_inner_dim"
)
# A shell, or the file `.deepspeed_env`, would read these characters.
_FORBIDDEN = (";", "\n", "<", ">", " ")
_MULTI_DEVICE = tuple(kind for kind in DistributedType if kind.value.startswith("MULTI_"))


# -- what every process gets ---------------------------------------------------------------------------------


def _shared(args: argparse.Namespace) -> dict[str, str]:
    """Variables that every way of starting processes sets.

    Raises:
        ValueError: an unknown precision or compile backend.
    """
    precision = _member(PrecisionType, args.mixed_precision or "no", "mixed_precision mode")
    variables = {"ACCELERATE_MIXED_PRECISION": precision}
    backend = _member(DynamoBackend, (args.dynamo_backend or "no").upper(), "dynamo backend")
    # DeepSpeed compiles by a key of its own config.
    if not args.use_deepspeed:
        variables["ACCELERATE_DYNAMO_BACKEND"] = backend
        variables["ACCELERATE_DYNAMO_MODE"] = args.dynamo_mode
        for name in ("fullgraph", "dynamic", "regional_compilation"):
            variables[f"ACCELERATE_DYNAMO_USE_{name.upper()}"] = str(getattr(args, f"dynamo_use_{name}"))
    if args.debug:
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if args.gpu_ids not in (None, "all"):
        variables["CUDA_VISIBLE_DEVICES"] = args.gpu_ids
    return variables


def _member(kind: Any, word: str, name: str) -> str:
    """The word, where it is one of an enumeration.

    Raises:
        ValueError: it is none.
    """
    value = word.lower() if kind is PrecisionType else word
    try:
        return str(kind(value).value)
    except ValueError:
        raise ValueError(f"Unknown {name}: {word}. Choose between {kind.list()}.") from None


def _threads(args: argparse.Namespace) -> dict[str, str]:
    variables = {"OMP_NUM_THREADS": str(args.num_cpu_threads_per_process)}
    if args.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    return variables


def _python(args: argparse.Namespace) -> list[str]:
    """The command of one process.

    Raises:
        ValueError: --module and --no_python together.
    """
    if args.module and args.no_python:
        raise ValueError("--module and --no_python cannot be used together")
    command = [] if args.no_python else [sys.executable]
    if args.module:
        command.append("-m")
    return [*command, args.training_script, *args.training_script_args]


# -- the builders --------------------------------------------------------------------------------------------


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one process, or of several through mpirun.

    Raises:
        ValueError: flags that do not go together, or an unknown precision or compile backend.
    """
    on_cpu = getattr(args, "use_cpu", args.cpu)
    command = _python(args)
    variables = _shared(args) | _threads(args) | {"ACCELERATE_USE_CPU": str(on_cpu or False)}
    num_processes = args.num_processes or 1
    num_machines = args.num_machines or 1
    if num_processes > 1 or num_machines > 1:
        variables["MASTER_ADDR"] = args.main_process_ip or "127.0.0.1"
        variables["MASTER_PORT"] = str(_port(args.main_process_port))
    if on_cpu:
        # Intel's OpenMP keeps threads on their cores, and lets them sleep soon.
        variables |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
        if args.mpirun_hostfile and num_processes > 1:
            per_node = str(num_processes // num_machines)
            hosts = ["--hostfile", args.mpirun_hostfile, "--npernode", per_node, "-n", str(num_processes)]
            command = ["mpirun", *hosts, "--bind-to", "socket", *command]
    return command, environment.snapshot() | variables


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Environment of processes that torchrun starts; sets torchrun's own arguments in `args`.

    Raises:
        ValueError: as `prepare_simple_launcher_cmd_env`.
    """
    _python(args)
    _torchrun(args)
    variables = _shared(args) | _threads(args)
    if args.use_fsdp:
        variables["ACCELERATE_USE_FSDP"] = "true"
        variables |= _said_of_fsdp(args)
    current = environment.snapshot() | variables
    if args.use_parallelism_config:
        return prepare_extend_env_parallelism_config(args, current)
    return current


def _said_of_fsdp(args: argparse.Namespace) -> dict[str, str]:
    variables = {}
    for name in _FSDP.split():
        value = getattr(args, f"fsdp_{name}", None)
        if value is not None:
            variables[FIELDS[f"fsdp_{name}"].variable] = str(value)
    return variables


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Environment of processes that use DeepSpeed; the command is None, as they are started as others are.

    Raises:
        ValueError: as `prepare_simple_launcher_cmd_env`.
    """
    _python(args)
    _torchrun(args)
    shared = _shared(args)
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", "")
    variables = {**shared, "ACCELERATE_CONFIG_DS_FIELDS": str(fields).lower(), "ACCELERATE_USE_DEEPSPEED": "true"}
    for name, variable in _DEEPSPEED.items():
        value = getattr(args, name, None)
        if value is not None:
            variables[f"ACCELERATE_{variable}"] = str(value)
    if args.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    current = environment.snapshot() | variables
    current["PYTHONPATH"] = env_var_path_add("PYTHONPATH", os.path.abspath("."))
    if args.use_parallelism_config:
        current = prepare_extend_env_parallelism_config(args, current)
    return None, current


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the sizes of the axes to an environment."""
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    wanted = ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend"]
    if args.parallelism_config_cp_size > 1:
        wanted.append("cp_comm_strategy")
    if args.parallelism_config_sp_size > 1:
        wanted += ["sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"]
    for name in wanted:
        current_env[f"PARALLELISM_CONFIG_{name.upper()}"] = str(getattr(args, f"parallelism_config_{name}"))
    return current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the words for 8-bit arithmetic to an environment, as accelerate's recipes read them."""
    for name in _FP8.split():
        value = getattr(args, f"fp8_{name}")
        if value is not None:
            current_env[f"ACCELERATE_FP8_{name.upper()}"] = str(value)
    for name, value in zip(("FPROP", "DGRAD", "WGRAD"), args.fp8_override_linear_precision, strict=True):
        current_env[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return current_env


def _torchrun(args: argparse.Namespace) -> None:
    """Sets the number of processes, the number of hosts and where they meet, under torchrun's names."""
    machines = args.num_machines or 1
    if machines > 1:
        args.nproc_per_node = str(args.num_processes // machines)
        args.nnodes = str(machines)
        args.node_rank = int(args.machine_rank)
        if getattr(args, "same_network", False):
            args.master_addr = str(args.main_process_ip)
            args.master_port = str(args.main_process_port)
        else:
            args.rdzv_endpoint = f"{args.main_process_ip}:{args.main_process_port}"
        return
    args.nproc_per_node = str(args.num_processes)
    args.master_port = str(_port(args.main_process_port))


def _port(said: int | None) -> int:
    """A port: the one that was said, a free one for 0, else 29500."""
    if said != 0:
        return said or _PORT
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


# -- small things --------------------------------------------------------------------------------------------


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A variable that holds folders, with one more at its end."""
    folders = [folder for folder in environment.snapshot().get(env_var_name, "").split(":") if folder]
    return ":".join([*folders, path_to_add])


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """A line `NAME=VALUE` for each variable; those that a shell would misread are left out, and told of."""
    lines = []
    for name, value in current_env.items():
        if not name or not value or any(character in name + value for character in _FORBIDDEN):
            _log.warning("Skipping %s=%s as it contains forbidden characters or missing values.", name, value)
            continue
        lines.append(f"{name}={value}\n")
    return lines


class PrepareForLaunch:
    """Calls a function in a process that was forked, once it has told the process its rank.

    Args:
        launcher: the function.
        distributed_type: how processes talk; for `MULTI_*` each gets a rank.
        debug: accepted; accelerate's way of finding each other by a file is not needed here.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.debug = debug
        self.distributed_type = DistributedType(getattr(distributed_type, "value", str(distributed_type).upper()))

    def __call__(self, index: int, *args: Any) -> None:
        """Runs the function as process `index` of this host."""
        variables = {"FORK_LAUNCHED": "1"}
        if self.distributed_type in _MULTI_DEVICE:
            env = environment.snapshot()
            first = int(env.get("NODE_RANK", "0")) * int(env.get("NPROC", env.get("LOCAL_WORLD_SIZE", "1")))
            variables |= {"LOCAL_RANK": str(index), "RANK": str(first + index)}
        environment.export(variables)
        self.launcher(*args)


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """The arguments that another parser knows: as in `args` where they are there, else its own defaults."""
    own_arguments, _ = parser.parse_known_args(default_args)
    for name in vars(own_arguments).keys() & vars(args).keys():
        setattr(own_arguments, name, getattr(args, name))
    return own_arguments
