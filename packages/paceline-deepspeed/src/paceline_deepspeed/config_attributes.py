"""`ConfigAttributes`: a config by the attributes that DeepSpeed's own object has, as in `engine._config.zero_config.stage`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from paceline.base import env as environment
from paceline.world import runtime
from paceline.world.world import World
from paceline_deepspeed.config import Batch, DeepSpeedConfig, read
from paceline_deepspeed.width import data_ranks

# Attribute -> the block that it is; a block has an attribute for each of its keys.
_BLOCKS = {
    "activation_checkpointing_config": "activation_checkpointing",
    "autotuning_config": "autotuning",
    "bfloat16_config": "bf16",
    "checkpoint_config": "checkpoint",
    "comms_config": "comms_logger",
    "flops_profiler_config": "flops_profiler",
    "float16_config": "fp16",
    "tensor_parallel_config": "tensor_parallel",
    "zero_config": "zero_optimization",
}
# Attribute -> its key, where that is called otherwise.
_KEYS = {
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_optimization_stage": "zero_optimization.stage",
}
_OPTIMIZERS = ("adam", "adamw", "lamb", "lion", "muon", "adagrad")
_MONITORS = ("tensorboard", "comet", "wandb", "csv_monitor")
_OFFLOADED = ("offload_optimizer", "offload_param")


class _HasBatch(Protocol):
    @property
    def batch(self) -> Batch: ...


@dataclass(frozen=True)
class _FixedBatch:
    """The batch of a config that no engine has."""

    batch: Batch


class ConfigAttributes:
    """What a config says.

    A key at the top level is the attribute of its name. A block is a namespace: `zero_config.offload_param.device`.

    Args:
        config: a file's path, base64 of JSON, or the dict itself.
        mpu, mesh_device: are accepted and have no effect, because the config itself says what the ranks divide.

    Raises:
        ConfigError: those of the config, and `deepspeed-batch`.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: object = None, mesh_device: object = None) -> None:
        parsed = read(runtime.current().foreign_config("deepspeed", config), code="DeepSpeedConfig({})")
        width = data_ranks(parsed, World.detect().size, environment.snapshot())
        self._config = parsed
        self._batch_owner: _HasBatch = _FixedBatch(parsed.batch(width))

    @classmethod
    def of_engine(cls, config: DeepSpeedConfig, view: _HasBatch) -> ConfigAttributes:
        """Returns the attributes of an engine's config, whose batch may change; `view` has the batch of the moment."""
        attributes = cls.__new__(cls)
        attributes._config = config
        attributes._batch_owner = view
        return attributes

    @property
    def train_batch_size(self) -> int:
        return self._batch_owner.batch.train

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch_owner.batch.micro

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._batch_owner.batch.accumulate

    @property
    def world_size(self) -> int:
        """How many ranks read different samples."""
        return self._batch_owner.batch.width

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's type, in small letters where it is one of DeepSpeed's own."""
        name: str | None = self._config["optimizer.type"]
        if name is not None and name.lower() in _OPTIMIZERS:
            return name.lower()
        return name

    @property
    def zero_enabled(self) -> bool:
        return bool(self._config["zero_optimization.stage"])

    @property
    def monitor_config(self) -> SimpleNamespace:
        """The blocks of all monitors, whether one of them is on, and the config itself, which `MonitorMaster` reads."""
        return _monitor_config(self._config)

    @property
    def _param_dict(self) -> dict[str, Any]:
        """The config as the script has given it, without the defaults."""
        given: dict[str, Any] = {}
        for place in self._config.places:
            if place not in self._config.values:
                continue  # a block, whose keys have places of their own
            *blocks, key = place.split(".")
            inner = given
            for block in blocks:
                inner = inner.setdefault(block, {})
            inner[key] = self._config[place]
        return given

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for names before there is a config.
        config: DeepSpeedConfig | None = self.__dict__.get("_config")
        if config is None or name.startswith("_"):
            raise AttributeError(name)
        if name in _BLOCKS:
            return _namespace(config[_BLOCKS[name]])
        key = _KEYS.get(name, name)
        if key not in config.values:
            raise AttributeError(f"{config.source} has no key that DeepSpeed's configs have as {name!r}")
        return config[key]


def get_monitor_config(param_dict: Mapping[str, Any]) -> SimpleNamespace:
    """Returns what `monitor_config` of a config is, by a dict with the blocks of monitors; its other keys are left out."""
    blocks = {name: param_dict[name] for name in _MONITORS if name in param_dict}
    return _monitor_config(read(blocks, code="get_monitor_config({})"))


def _monitor_config(config: DeepSpeedConfig) -> SimpleNamespace:
    blocks = {name: _namespace(config[name]) for name in _MONITORS}
    return SimpleNamespace(**blocks, enabled=any(block.enabled for block in blocks.values()), parsed=config)


def _namespace(block: DeepSpeedConfig) -> SimpleNamespace:
    """Returns a block with an attribute for each key; a block of offloaded states that offloads nothing is None."""
    namespace = SimpleNamespace()
    for name in dict.fromkeys(key.partition(".")[0] for key in block.values):
        value = block[name]
        if isinstance(value, DeepSpeedConfig):
            value = _namespace(value)
            if name in _OFFLOADED and value.device == "none":
                value = None
        setattr(namespace, name, value)
    return namespace
