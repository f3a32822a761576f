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
from paceline.config.engine_fields import FIELDS
from paceline.config.given import Choice, Given
from paceline.config.settings import settings_of

TOTAL = "num_processes"  # over all nodes together, where `procs` counts per node


_OFF = ("no", "false", "", "none", "null", "0")
_SHARDING = "leave it out; `--zero 1`, 2 or 3 divides optimizer states, gradients and parameters"
_HERE = "start `paceline launch` on the machine itself"


@dataclass(frozen=True)
class Foreign:
    """Some of accelerate's names, none of them a setting of ours, that are treated alike.

    Attributes:
        names: the names, with blanks between.
        why: what they are for.
        idle: values (in small letters) that ask for nothing; None where no value has an effect.
        fix: what to do instead; "" where every value is idle.
        takes: whether a value follows on the command line; None for names that stand in files alone.
        tell: a value in a file that is not "off" is worth a notice.
    """

    names: str
    why: str
    idle: tuple[str, ...] | None = None
    fix: str = ""
    takes: bool | None = None
    tell: bool = False


_ROWS = (
    Foreign("same_network", "nodes are found by main_address alone", takes=False),
    Foreign("multi_gpu use_xpu", "`procs` says it", takes=False),
    Foreign("role main_training_function", "the whole script is run, whatever it is called", takes=True),
    Foreign("quiet", "there is nothing to silence: a failing rank is reported once", takes=False),
    Foreign("enable_cpu_affinity", "processes are not bound to cores; use numactl for that", takes=False, tell=True),
    Foreign("use_parallelism_config", "the sizes of the axes say it", takes=False),
    Foreign("compute_environment", "it says where the run takes place", ("local_machine",), _HERE),
    Foreign(
        "distributed_type",
        "it names how accelerate divides the work",
        ("no", "multi_gpu", "multi_cpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_musa", "multi_hpu", "deepspeed"),
        "set distributed_type to MULTI_GPU (MULTI_CPU without one)",
    ),
    Foreign("use_deepspeed", "it asks for DeepSpeed's engine", _OFF, _SHARDING, False),
    Foreign(
        "use_megatron_lm", "it asks for Megatron-LM's engine", _OFF, "`--tp`, `--pp` and `--zero` divide a model", False
    ),
    Foreign("gradient_clipping", "it is DeepSpeed's", _OFF, "call `accelerator.clip_grad_norm_` in the script", True),
    Foreign(
        "deepspeed_config megatron_lm_config fp8_config",
        "it counts only where distributed_type or mixed_precision asks for it",
    ),
    Foreign("mpirun_hostfile", "it starts processes through mpirun", _OFF, "run `mpirun -n N python script.py`", True),
    Foreign("tpu", "it asks for TPUs", _OFF, "use the CPU, or an accelerator that `torch.accelerator` knows", False),
    Foreign("downcast_bf16 tpu_use_cluster tpu_use_sudo", "it concerns TPUs alone", takes=False),
    Foreign("tpu_name tpu_zone", "it concerns TPUs alone", takes=True),
    Foreign("tpu_vm tpu_env command_file commands", "it concerns TPUs alone"),
)
FOREIGN: Mapping[str, Foreign] = MappingProxyType({name: row for row in _ROWS for name in row.names.split()})

# Those that may stand on a command line, and whether a value follows.
FLAGS: Mapping[str, bool] = MappingProxyType(
    {
        TOTAL: True,
        **{name: row.takes for name, row in FOREIGN.items() if row.takes is not None},
        **{name: row.takes for name, row in FIELDS.items() if row.takes is not None},
    }
)

# Families of flags and keys that belong to one engine, by how their names begin.
_FAMILIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fsdp_": ("accelerate 1.15 has no such field of FSDP", "leave it out"),
        "deepspeed_": ("it configures DeepSpeed", _SHARDING),
        "zero_": ("it configures DeepSpeed", _SHARDING),
        "zero3_": ("it configures DeepSpeed", _SHARDING),
        "offload_": ("it configures DeepSpeed", _SHARDING),
        "megatron_lm_": ("it configures Megatron-LM", "leave it out; `--tp`, `--pp` and `--zero` divide a model"),
        "fp8_": ("it configures float8 arithmetic", "use mixed_precision bf16"),
        "parallelism_config_": (
            "accelerate 1.15 has no such field",
            "leave it out; the sizes of dp_replicate, dp_shard, tp, cp and sp are read",
        ),
        "aws_": ("it concerns SageMaker", _HERE),
        "tpu_": ("it concerns TPUs", "leave it out"),
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
    return [TOTAL, *aliases, *FOREIGN, *(name for name, row in FIELDS.items() if row.takes is not None)]


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


def notice(row: Choice) -> str:
    """What to tell the user about a value without effect; "" where `paceline explain` is enough."""
    foreign = FOREIGN.get(row.field)  # None: a field of accelerate's DeepSpeed
    asked = (foreign is None or foreign.tell) and str(row.value).lower() not in _OFF
    reason = row.reason.removeprefix("no effect here: ")
    return f"{row.field} ({row.where}) has no effect: {reason}." if asked or row.source == "command line" else ""


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
