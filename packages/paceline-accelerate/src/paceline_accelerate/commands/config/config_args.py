"""The classes of accelerate's config files, `ClusterConfig` and `SageMakerConfig`, which are YAML or JSON.

They are for `accelerate config` and for scripts that read or make such files themselves. `paceline launch` reads the same
files through `paceline_accelerate.dialect`, which accepts more.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from paceline.base import env as environment
from paceline_accelerate.dialect import DIALECT
from paceline_accelerate.kinds import ComputeEnvironment, DistributedType, SageMakerDistributedType

default_config_file = str(DIALECT.default_file(environment.snapshot()))
cache_dir = os.path.dirname(default_config_file)
# Both are YAML in accelerate too.
default_yaml_config_file = default_json_config_file = os.path.join(cache_dir, "default_config.yaml")
hf_cache_home = os.path.dirname(cache_dir)

SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Reads accelerate's config file; its default file where none is named.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has unknown keys, or no `distributed_type`.
    """
    if config_file is None:
        config_file = default_config_file
    elif not os.path.isfile(config_file):
        raise FileNotFoundError(
            f"The config file {config_file!r} does not exist: name one that exists, or leave --config_file out for the "
            "default one, which `accelerate config` writes."
        )
    is_json = config_file.endswith(".json")
    values = _read(config_file)
    environment_name = values.get("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
    config_class = ClusterConfig if environment_name == ComputeEnvironment.LOCAL_MACHINE else SageMakerConfig
    return config_class.from_json_file(config_file) if is_json else config_class.from_yaml_file(config_file)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    text = Path(path).read_text(encoding="utf-8")
    values = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings: write one `key: value` on each line.")
    return values


@dataclass
class BaseConfig:
    """The values that all config files of accelerate have."""

    compute_environment: Any
    distributed_type: Any
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    _enumerations: ClassVar[dict[str, type[Enum]]] = {
        "compute_environment": ComputeEnvironment,
        "distributed_type": DistributedType,
    }

    def __post_init__(self) -> None:
        for name, enumeration in self._enumerations.items():
            value = getattr(self, name)
            if isinstance(value, str) and not isinstance(value, Enum):
                setattr(self, name, enumeration(value))
        if getattr(self, "dynamo_config", None) is None:
            self.dynamo_config: dict[str, Any] | None = {}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without blocks that are empty and values that are None."""
        values = {}
        for name, value in vars(self).items():
            plain = value.value if isinstance(value, Enum) else value
            if plain is not None and plain != {}:
                values[name] = plain
        return values

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Adds the keys that older files leave out, and replaces `fp16` and `dynamo_backend` by newer keys.

        Raises:
            ValueError: there is no `distributed_type`.
        """
        config_dict.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
        if "distributed_type" not in config_dict:
            raise ValueError("The config file has no `distributed_type`: add one, such as `distributed_type: 'NO'`.")
        if "num_processes" not in config_dict and config_dict["distributed_type"] == DistributedType.NO:
            config_dict["num_processes"] = 1
        if "mixed_precision" not in config_dict:
            config_dict["mixed_precision"] = "fp16" if config_dict.get("fp16") else None
        config_dict.pop("fp16", None)
        backend = config_dict.pop("dynamo_backend", None)
        if backend is not None:
            is_off = str(backend).upper() == "NO" or backend is False
            config_dict["dynamo_config"] = {} if is_off else {"dynamo_backend": backend}
        config_dict.setdefault("use_cpu", False)
        config_dict.setdefault("debug", False)
        config_dict.setdefault("enable_cpu_affinity", False)
        return config_dict

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Reads a JSON file; the default one where none is named.

        Raises:
            ValueError: as `load_config_from_file`.
        """
        return cls._from_file(json_file or default_json_config_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Reads a YAML file; the default one where none is named.

        Raises:
            ValueError: as `load_config_from_file`.
        """
        return cls._from_file(yaml_file or default_yaml_config_file)

    @classmethod
    def _from_file(cls, path: str) -> Self:
        values = cls.process_config(_read(path))
        field_names = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - field_names)
        if unknown:
            raise ValueError(
                f"The config file at {path} had unknown keys ({unknown}): remove them, or correct how they are written."
            )
        return cls(**values)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Writes a JSON file."""
        Path(json_file).write_text(self.as_json(), encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Writes a YAML file."""
        Path(yaml_file).write_text(self.as_yaml(), encoding="utf-8")

    def as_json(self) -> str:
        """Returns the text of a JSON file."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def as_yaml(self) -> str:
        """Returns the text of a YAML file."""
        return yaml.safe_dump(self.to_dict())


@dataclass
class ClusterConfig(BaseConfig):
    """The values of a config file for one's own machines."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for block in ("deepspeed", "fsdp", "megatron_lm", "mpirun", "fp8", "parallelism"):
            if getattr(self, f"{block}_config") is None:
                setattr(self, f"{block}_config", {})
        super().__post_init__()


@dataclass
class SageMakerConfig(BaseConfig):
    """The values of a config file for SageMaker. Paceline reads such files, but starts nothing there."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    _enumerations: ClassVar[dict[str, type[Enum]]] = {
        "compute_environment": ComputeEnvironment,
        "distributed_type": SageMakerDistributedType,
    }
