"""The names of DeepSpeed, and what of ours stands for each.

    names.txt       public names of DeepSpeed, by module: what exists, and so may be imported
    _CARRIED        those that do something here, by the module of ours that has them
    the rest        raise `CompatError` when they are used; `native_way` says what to do instead

A name means the same in all modules that have it, unless it is listed under a module of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

VERSION = "0.19.8"

_HERE = "paceline.compat.deepspeed"
# Module of ours -> names; `theirs=ours` where ours is called otherwise. Where a name means this in some modules alone:
# {"deepspeed.comm deepspeed.comm.comm": names}, modules of theirs -> names.
_CARRIED: dict[str, str | dict[str, str]] = {
    _HERE: "version=VERSION",
    f"{_HERE}.initialize": "add_config_arguments initialize",
    f"{_HERE}.processes": "init_distributed",
    f"{_HERE}.engine": "DeepSpeedEngine",
    f"{_HERE}.optimizers": "DeepSpeedCPUAdagrad DeepSpeedCPUAdam FusedAdam FusedLamb",
    "paceline.optim.lion": "DeepSpeedCPULion=Lion FusedLion=Lion",
    "paceline.optim.optimizer": "DeepSpeedOptimizer=PreparedOptimizer",
    "paceline.data.loader": "DeepSpeedDataLoader=PreparedLoader",
    "paceline.base.errors": "DeepSpeedConfigError=ConfigError",
    f"{_HERE}.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    f"{_HERE}.pipe_engine": "PipelineEngine",
    f"{_HERE}.profiling": "FlopsProfiler SynchronizedWallClockTimer duration_to_string flops_to_string get_model_profile "
    "log_summary macs_to_string number_to_string params_to_string",
    f"{_HERE}.topology": "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology",
    f"{_HERE}.schedules": "LRRangeTest OneCycle TOTAL_NUM_STEPS VALID_LR_SCHEDULES WARMUP_LINEAR_RATE WARMUP_LOG_RATE "
    "WarmupCosineLR WarmupDecayLR WarmupLR add_tuning_arguments",
}

# First match counts: pattern of a name, why it is not carried, what to do.
_NATIVE_WAYS = (
    (
        r"[Ii]nference|KV|MLA|replace_transformer|module_inject|QUERY",
        "Paceline trains; it serves no models",
        "load the trained weights (`engine.save_16bit_model`) in a library that serves them",
    ),
    (
        r"OneBit|ZeroOne|[Cc]ompress|[Qq]uantiz|FP8|fp_quant|[Ss]parse",
        "compressed communication and quantised training are not carried",
        "leave it out; gradients can be sent in bf16: `communication_data_type: bf16`",
    ),
    (
        r"MoE|moe|[Ee]xpert|TopKGate",
        "experts that are divided over ranks are not built",
        "write the layer in torch; its parameters are divided by ZeRO like any others",
    ),
    (
        r"tp_model|TensorParallel|[Tt]ensor_parallel|autotp|AutoTP|model_parallel|mpu",
        "tensor parallelism is an axis of the plan, not a group that a script makes",
        "native: `paceline.Accelerator(plan={'tp': 2})`",
    ),
    (
        r"[Ss]equence|Ulysses|DistributedAttention|vocab_",
        "long sequences are divided by the plan, and the model's own attention calls are met",
        "native: `paceline.Accelerator(plan={'cp': 2})`",
    ),
    (
        r"Tuner|tuning",
        "configurations are tried out by a command of Paceline's",
        "run `paceline tune script.py`",
    ),
    (
        r"Hybrid|Rollout|ZenFlow|SuperOffload|DualPipe|Domino|Transformer|TiledLinear|Swap|AIO|aio",
        "this engine or kernel of DeepSpeed's is not carried",
        "use `deepspeed.initialize` with `zero_optimization`, whose `offload_*` keys move states to the host",
    ),
    (
        r"^(get|safe|set)_|fragment|hp_|partition|Partition|Fragment",
        "parameters are divided in another way here, without fragments of flat buffers",
        "read them with `deepspeed.zero.GatheredParameters`, or natively `accelerator.full_parameters(model)`",
    ),
)
_DEFAULT_WAY = (
    "no script that we know of needs it",
    "see `docs/migrating-from-deepspeed.md`, or run this script with deepspeed itself, without --compat",
)


@cache
def modules() -> dict[str, frozenset[str]]:
    """Names of DeepSpeed's modules, each with its public names."""
    found = {}
    for line in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines():
        name, _, names = line.partition(":")
        found[name] = frozenset(names.split())
    return found


@cache
def carried() -> dict[str, str]:
    """Name of theirs, with its module where it means this there alone -> "module:name" of ours."""
    return dict(_entries())


def _entries() -> Iterator[tuple[str, str]]:
    for ours, told in _CARRIED.items():
        for modules_of_theirs, names in (told if isinstance(told, dict) else {"": told}).items():
            for before in [f"{each}." for each in modules_of_theirs.split()] or [""]:
                for theirs, _, own in (pair.partition("=") for pair in names.split()):
                    yield f"{before}{theirs}", f"{ours}:{own or theirs}"


def native_way(name: str) -> tuple[str, str]:
    """Why a name is not carried, and what to do instead."""
    return next(((why, fix) for pattern, why, fix in _NATIVE_WAYS if re.search(pattern, name)), _DEFAULT_WAY)
