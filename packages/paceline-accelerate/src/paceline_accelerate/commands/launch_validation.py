"""`_validate_launch_command` and `_convert_nargs_to_dict`: private functions of accelerate that launch wrappers call.

    flags       win, where they were typed
    a file      --config_file, or the default one, which --cpu leaves unread
    defaults    of accelerate

`accelerate launch` itself does not need them: `paceline launch` reads flags and files by its own rules.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any

from paceline.base import env as environment
from paceline.launch import host
from paceline_accelerate.commands.config.config_args import (
    BaseConfig,
    ClusterConfig,
    default_config_file,
    load_config_from_file,
)
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.kinds import DistributedType

_log = logging.getLogger(__name__)

_PLATFORMS = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
# `distributed_type` of a file -> the flag that says the same; the kinds of devices are added below.
_FLAG_OF = {
    DistributedType.DEEPSPEED: "use_deepspeed",
    DistributedType.FSDP: "use_fsdp",
    DistributedType.XLA: "tpu",
    DistributedType.MEGATRON_LM: "use_megatron_lm",
}
_HOST_FLAG = "multi_gpu"
# These keys of a file are read by rules of their own.
_APART = ("compute_environment", "distributed_type", "mixed_precision", "gpu_ids", "debug")
# Keys of these blocks may leave out the beginning of the flag's name.
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_BOOLEANS = {"True": True, "False": False}


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, BaseConfig | None, bool]:
    """Fills the arguments of `launch_command_parser` from the config file and by defaults, in place.

    Returns:
        the arguments, the config file or None, and whether the precision comes from the file.

    Raises:
        ValueError: flags that do not go together, or a file without a number of processes.
        FileNotFoundError: `--config_file` names no file.
    """
    _check_flags(args)
    config = None
    precision_from_file = False
    if args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu):
        config = load_config_from_file(args.config_file)
        precision_from_file = args.mixed_precision is None and config.mixed_precision is not None
        _fill_from_file(args, config)
    _fill_by_default(args, is_without_file=config is None)
    return args, config, precision_from_file


def _check_flags(args: argparse.Namespace) -> None:
    platforms = [name for name in _PLATFORMS if getattr(args, name)]
    if len(platforms) > 1:
        flags = ", ".join(f"`--{name}`" for name in _PLATFORMS)
        raise _refused(
            f"You can only use one of {flags} at a time.",
            "given: " + ", ".join(f"--{name}" for name in platforms),
            "leave out all but one of them",
        )
    if args.multi_gpu and args.num_processes is not None and args.num_processes < 2:
        raise _refused(
            "You need to use at least 2 processes to use `--multi_gpu`.",
            f"--num_processes {args.num_processes}",
            "pass a larger number, or leave --multi_gpu out",
        )
    if args.use_parallelism_config and not args.use_fsdp:
        raise _refused(
            "You cannot use `--use_parallelism_config` without `--use_fsdp` and `--fsdp_version=2`.",
            "the sizes of the axes are those of FSDP",
            "pass --use_fsdp --fsdp_version 2 too",
        )


def _refused(what: str, why: str, fix: str) -> CompatValueError:
    return CompatValueError("compat-argument", what, why, fix)


def _fill_from_file(args: argparse.Namespace, config: BaseConfig) -> None:
    """Sets what no flag says, from a file.

    Raises:
        CompatValueError: `compat-argument`, for a file of a pod of TPUs, which has no number of processes, and for several
            GPUs of which one is named.
    """
    if args.mixed_precision is None:
        args.mixed_precision = config.mixed_precision
    if not isinstance(config, ClusterConfig):
        return
    if args.num_processes is None and config.num_processes == -1:
        raise _refused(
            "You need to manually pass in `--num_processes` using this config yaml.",
            "num_processes: -1",
            "pass --num_processes",
        )
    _choose_platform(args, config)
    if args.gpu_ids is None:
        args.gpu_ids = "all" if config.gpu_ids is None else config.gpu_ids
    has_one_device = args.gpu_ids != "all" and "," not in args.gpu_ids
    if args.multi_gpu and has_one_device and (args.num_machines or 1) == 1:
        raise _refused(
            "Less than two GPU ids are given, and several GPUs are asked for.",
            f"gpu_ids: {args.gpu_ids}",
            "name at least two in `--gpu_ids`, or pass --gpu_ids all",
        )
    typed: set[str] = getattr(args, "nondefault", set())
    for name, value in vars(config).items():
        if isinstance(value, dict):
            _fill_from_block(args, name, value, typed)
        elif name not in _APART and getattr(args, name, None) is None:
            setattr(args, name, value)
    if not args.debug:
        args.debug = config.debug


def _choose_platform(args: argparse.Namespace, config: ClusterConfig) -> None:
    """Sets the flag that means the same as `distributed_type`, if no such flag was given."""
    chosen = (_HOST_FLAG, *_FLAG_OF.values(), "tpu_use_cluster")
    if any(getattr(args, name) for name in chosen):
        return
    kind = config.distributed_type
    # Without quotes, YAML reads NO as false.
    if kind is False:
        kind = DistributedType.NO
    is_of_devices = kind.value.startswith("MULTI_") and kind != DistributedType.MULTI_CPU
    flag = _HOST_FLAG if is_of_devices else _FLAG_OF.get(kind)
    if flag is not None:
        setattr(args, flag, True)
    args.tpu_use_cluster = config.tpu_use_cluster if args.tpu else False
    args.use_parallelism_config = bool(config.parallelism_config)


def _fill_from_block(args: argparse.Namespace, block: str, values: dict[str, Any], typed: set[str]) -> None:
    prefix = _PREFIXES.get(block, "")
    for key, value in values.items():
        name = key if key.startswith(prefix) else prefix + key
        if name not in typed:
            setattr(args, name, value)


def _fill_by_default(args: argparse.Namespace, *, is_without_file: bool) -> None:
    """Sets the defaults of accelerate for what is None, and warns of those that a file would have said."""
    if is_without_file:
        args.use_cpu = args.cpu
    args.debug = bool(args.debug)
    defaults = {
        "num_processes": host.accelerators().count,
        "num_machines": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
    }
    filled = []
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
            filled.append(f"--{name} {value}")
    if filled and is_without_file:
        _log.warning(
            "these flags have default values, because no config file says anything else: %s", ", ".join(filled)
        )
    if args.num_cpu_threads_per_process is None:
        args.num_cpu_threads_per_process = _threads(args)


def _threads(args: argparse.Namespace) -> int:
    """Counts the threads of one process: OMP_NUM_THREADS, on the CPU its part of the cores, else one."""
    given = environment.get("OMP_NUM_THREADS")
    if given:
        return int(given)
    if not args.use_cpu or args.num_processes < 1:
        return 1
    processes_of_host: int = max(args.num_processes // args.num_machines, 1)
    return max(host.cores() // processes_of_host, 1)


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Reads the arguments of a script as names with values: numbers, "True", "False" and other text.

    ["--lr", "0.1", "--do-eval", "True"] -> {"lr": 0.1, "do_eval": True}

    Raises:
        ValueError: a name without a value, or a value that begins with "-".
        SystemExit: a value without a name.
    """
    parser = argparse.ArgumentParser()
    for position, word in enumerate(nargs):
        if not word.startswith("-"):
            continue
        value = nargs[position + 1] if position + 1 < len(nargs) else "-"
        if value.startswith("-"):
            raise _refused(
                f"the argument {word} has no value: flags of argparse's `store_true` or `store_false` are not supported.",
                "each name needs a value that does not begin with a hyphen",
                f"write `{word} True`, and give the argument a type in the script",
            )
        parser.add_argument(word, type=_value_of)
    return vars(parser.parse_args(list(nargs)))


def _value_of(text: str) -> Any:
    """Reads a value; a number without a fraction becomes a whole one: "1e3" and "1000.0" are 1000."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
