"""accelerate's names in flags and files: what each means here, which have no effect, and which cannot be served.

Its names for settings of ours stand with those settings (`settings.py`). This file holds the rest: nothing that
somebody wrote is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from paceline.base import env as environment
from paceline.base.errors import ConfigError, Problem
from paceline.config.given import Choice, Given
from paceline.config.settings import settings_of

TOTAL = "num_processes"  # over all nodes together, where `procs` counts per node


@dataclass(frozen=True)
class Foreign:
    """One of accelerate's names that is no setting of ours.

    Attributes:
        idle: values (in small letters) that ask for nothing; None where no value has an effect.
        why: what it is for.
        fix: what to do instead; "" where every value is idle.
    """

    idle: tuple[str, ...] | None
    why: str
    fix: str = ""


_OFF = ("no", "false", "", "none", "null", "0")
_TPU = Foreign(None, "it concerns TPUs alone")
_SHARDING = "leave it out: each process then holds the whole model (replicate)"
_COMPILE = "call `torch.compile(model)` in the script before `prepare`"

FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    {
        "compute_environment": Foreign(
            ("local_machine",), "it says where the run takes place", "start `paceline launch` on the machine itself"
        ),
        "distributed_type": Foreign(
            ("no", "multi_gpu", "multi_cpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_musa", "multi_hpu"),
            "it names how accelerate divides the work",
            "set distributed_type to MULTI_GPU (MULTI_CPU without one)",
        ),
        "same_network": Foreign(None, "nodes are found by main_address alone"),
        "main_training_function": Foreign(None, "it is used on TPUs alone; the whole script is run"),
        "enable_cpu_affinity": Foreign(None, "processes are not bound to cores; use numactl for that"),
        "downcast_bf16": _TPU,
        **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), _TPU),
        **dict.fromkeys(("command_file", "commands"), _TPU),
        **dict.fromkeys(
            ("fsdp_config", "deepspeed_config", "megatron_lm_config", "fp8_config"),
            Foreign(None, "it counts only where distributed_type or mixed_precision asks for it"),
        ),
        "mpirun_hostfile": Foreign(
            _OFF, "it starts processes through mpirun", "run `mpirun -n N python script.py`: its ranks are found"
        ),
        "dynamo_backend": Foreign(_OFF, "it compiles the model", _COMPILE),
        **dict.fromkeys(
            ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
            Foreign(None, "it counts only together with dynamo_backend"),
        ),
        **dict.fromkeys(
            ("multi_gpu", "use_parallelism_config", "use_xpu", "role"),
            Foreign(None, "`procs` and the layout settings say it"),
        ),
        "quiet": Foreign(None, "there is nothing to silence: a failing rank is reported once"),
        "gradient_clipping": Foreign((), "it is DeepSpeed's", "call `accelerator.clip_grad_norm_` in the script"),
        "tpu": Foreign(_OFF, "it asks for TPUs", "run on CPU or on an accelerator that `torch.accelerator` knows"),
        **dict.fromkeys(("use_fsdp",), Foreign(_OFF, "it asks for sharded models", _SHARDING)),
        **dict.fromkeys(("use_deepspeed",), Foreign(_OFF, "it asks for DeepSpeed's engine", _SHARDING)),
        **dict.fromkeys(("use_megatron_lm",), Foreign(_OFF, "it asks for Megatron-LM's engine", _SHARDING)),
    }
)

# Flags of accelerate's `launch` that may stand on a command line, and whether a value follows.
FLAGS: Mapping[str, bool] = MappingProxyType(
    {
        TOTAL: True,
        **dict.fromkeys(("dynamo_backend", "dynamo_mode", "role", "main_training_function", "mpirun_hostfile"), True),
        **dict.fromkeys(("gradient_clipping", "tpu_name", "tpu_zone"), True),
        **dict.fromkeys(
            ("same_network", "enable_cpu_affinity", "multi_gpu", "use_parallelism_config", "use_xpu"), False
        ),
        **dict.fromkeys(("quiet", "downcast_bf16", "tpu", "use_fsdp", "use_deepspeed", "use_megatron_lm"), False),
        **dict.fromkeys(("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"), False),
        **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo", "use_parallelism_config"), False),
    }
)

# Families of flags and keys that belong to one engine, by how their names begin.
_FAMILIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fsdp_": ("it configures accelerate's FSDP", _SHARDING),
        "deepspeed_": ("it configures DeepSpeed", _SHARDING),
        "zero_": ("it configures DeepSpeed", _SHARDING),
        "zero3_": ("it configures DeepSpeed", _SHARDING),
        "offload_": ("it configures DeepSpeed", _SHARDING),
        "megatron_lm_": ("it configures Megatron-LM", _SHARDING),
        "fp8_": ("it configures float8 arithmetic", "use mixed_precision bf16"),
        "parallelism_config_": (
            "this part of it has no counterpart yet",
            "leave it out; the sizes of dp_replicate, dp_shard, tp and cp are read",
        ),
        "aws_": ("it concerns SageMaker", "start `paceline launch` on the machine itself"),
        "tpu_": ("it concerns TPUs", "leave it out"),
        "vm": ("it concerns TPU pods", "leave it out"),
    }
)


@cache
def own_name(name: str) -> str:
    """Our setting for one of accelerate's names (or for our own name); "" where there is none."""
    if name == TOTAL:
        return "procs"
    for each in settings_of().values():
        if name == each.name or name in each.accelerate:
            return each.name
    return ""


def names() -> list[str]:
    """All of accelerate's names that are understood."""
    aliases = [alias for each in settings_of().values() for alias in each.accelerate]
    return [TOTAL, *aliases, *FOREIGN]


def judge(given: Given) -> Choice | Problem | None:
    """What one of accelerate's names, which is no setting of ours, comes to.

    Returns:
        A `Choice` that says why it has no effect, a `Problem` where it asks for what is not there, or None where
        accelerate has no such name.
    """
    foreign = FOREIGN.get(given.name)
    text = str(given.value).strip()
    if foreign is None:
        why, fix = next((row for start, row in _FAMILIES.items() if given.name.startswith(start)), ("", ""))
        return _refusal(given.name, given.where, why, fix) if why else None
    if foreign.idle is None or text.lower() in foreign.idle:
        return Choice(given.name, given.value, given.source, given.where, f"no effect here: {foreign.why}")
    shown = given.name if text.lower() == "true" else f"{given.name} {text}"
    return _refusal(shown, given.where, foreign.why, foreign.fix)


def _refusal(name: str, where: str, why: str, fix: str) -> Problem:
    return Problem("accelerate-feature", f"{name} is not supported.", f"{where}: {why}", fix)


def basic_config(mixed_precision: str, *, devices: int) -> dict[str, object]:
    """accelerate's config for one host with `devices` accelerators (0: the CPU), as its `write_basic_config` has it."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if devices > 1 else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(devices, 1),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": devices == 0,
    }


def write_basic_config(mixed_precision: str = "no", save_location: str | None = None) -> Path | bool:
    """Writes a config file in accelerate's form, unless there is one.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        save_location: the file; accelerate's default one where it is None.

    Returns:
        The file, or False where it existed and was left alone.

    Raises:
        ConfigError: `config-value` for another precision, `config-write` where the file cannot be written.
    """
    import json

    import torch

    from paceline.config.places import accelerate_default, write

    try:
        precision = settings_of()["mixed_precision"].kind.read(mixed_precision)
    except ValueError as error:
        raise ConfigError(
            "config-value",
            f"mixed_precision cannot be {mixed_precision!r}.",
            f"it comes from write_basic_config(mixed_precision=...); expected: {error}",
            'say mixed_precision="no"',
        ) from None
    default = accelerate_default(environment.snapshot()).with_suffix(".json")
    path = Path(save_location).expanduser() if save_location else default
    if path.exists():
        return False
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    write(path, json.dumps(basic_config(precision, devices=devices), indent=2) + "\n")
    return path
