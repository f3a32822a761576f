"""accelerate's argument classes that say what a plan says: DeepSpeed, tensor parallel, dynamo.

What each field comes to stands in `paceline.compat.accelerate.engine_fields`; `compat.fsdp.said_by` reads the objects.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from paceline.base import env as environment
from paceline.base.log import warn_once
from paceline.compat.accelerate.arguments import KwargsHandler
from paceline.compat.accelerate.deepspeed_words import said_by
from paceline.compat.accelerate.engine_fields import DYNAMO, ROWS
from paceline.compat.accelerate.kinds import DynamoBackend
from paceline.compat.accelerate.said_fields import SaidFields
from paceline.config.given import Given


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallel over `tp_size` ranks."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchDynamoPlugin(KwargsHandler, SaidFields):
    """Options of `torch.compile`; fields that are left None are filled from ACCELERATE_DYNAMO_* variables.

    Raises:
        ValueError: an unknown backend.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        env = environment.snapshot()
        said = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        rows = [row for row in ROWS if row.owner == DYNAMO and row.variable]
        unset = [row for row in rows if getattr(self, row.attribute) is None and env.get(row.variable)]
        for row in unset:
            text = env[row.variable]
            is_word = row.attribute in ("backend", "mode")
            setattr(self, row.attribute, text if is_word else environment.parse_bool(text))
            said[row.attribute] = text
        self.from_environment = tuple(row.attribute for row in unset)
        backend = getattr(self.backend, "value", self.backend) or "NO"
        self.backend = DynamoBackend(str(backend).upper())
        self.mode = self.mode or "default"
        self.fullgraph = bool(self.fullgraph)
        self.use_regional_compilation = bool(self.use_regional_compilation)
        self.remember(said)

    def __bool__(self) -> bool:
        return not self.disable and self.backend != DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """All fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from their defaults."""
        defaults = {
            "backend": "no",
            "mode": "default",
            "fullgraph": False,
            "dynamic": None,
            "options": None,
            "disable": False,
        }
        fields = self.to_dict()
        return {name: fields[name] for name, default in defaults.items() if fields[name] != default}


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's part of accelerate's arguments: a plan here, through the table of DeepSpeed's keys."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: Any = None
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: Any = None
    enable_msamp: Any = None
    msamp_opt_level: Any = None

    def said(self) -> list[Given]:
        """The same in our words; what has no effect is told of once.

        Raises:
            ConfigError: as `paceline.compat.deepspeed.config.read`.
        """
        code = "DeepSpeedPlugin({}=...)"
        told = said_by(
            [Given(each.name, getattr(self, each.name), "code", code.format(each.name)) for each in fields(self)],
            "code",
            "DeepSpeedPlugin(...)",
        )
        if told.unused:
            rows = "; ".join(f"{row.field} ({row.where}): {row.reason}" for row in told.unused)
            warn_once("config", f"{rows}.")
        return told.given
