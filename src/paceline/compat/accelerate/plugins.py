"""accelerate's argument classes that say what a plan says: FSDP, sizes of axes, tensor parallel, dynamo.

What each field comes to stands in `paceline.compat.accelerate.engine_fields`; `compat.fsdp.said_by` reads the objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline.compat.accelerate.arguments import KwargsHandler
from paceline.compat.accelerate.engine_fields import PLUGIN, ROWS
from paceline.compat.accelerate.kinds import DynamoBackend


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of accelerate's FSDP; fields that are left None are filled from FSDP_* variables."""

    fsdp_version: Any = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: Any = None
    param_init_fn: Any = None
    sync_module_states: Any = None
    forward_prefetch: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_offload: Any = None
    cpu_ram_efficient_loading: Any = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: Any = None

    def __post_init__(self) -> None:
        env = environment.snapshot()
        self.from_environment = tuple(
            row.attribute
            for row in ROWS
            if row.owner == PLUGIN and row.attribute and env.get(row.variable) and getattr(self, row.attribute) is None
        )
        variables = {row.attribute: row.variable for row in ROWS if row.owner == PLUGIN}
        for name in self.from_environment:
            setattr(self, name, env[variables[name]])
        self.fsdp_version = int(self.fsdp_version or 1)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Remembers the type; states are whole or divided as they are asked for, whatever it says."""
        self.state_dict_type = state_dict_type or self.state_dict_type

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing: units are found when the model is prepared."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the policy where there is none, or `override`."""
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = mixed_precision


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallel."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallel."""

    cp_comm_strategy: str | None = None


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of Ulysses."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallel over `tp_size` ranks."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`."""

    backend: Any = DynamoBackend.NO
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __bool__(self) -> bool:
        return not self.disable and str(self.backend).lower() not in ("no", "none")


@dataclass
class ParallelismConfig:
    """Sizes of the axes; what a plan of ours is."""

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    dp_replicate_enabled = property(lambda self: (self.dp_replicate_size or 1) > 1)
    dp_shard_enabled = property(lambda self: (self.dp_shard_size or 1) > 1)
    tp_enabled = property(lambda self: (self.tp_size or 1) > 1)
    cp_enabled = property(lambda self: (self.cp_size or 1) > 1)
    sp_enabled = property(lambda self: (self.sp_size or 1) > 1)
    fsdp_enabled = property(lambda self: self.dp_shard_enabled)
    fsdp_dim_names = property(lambda self: ["dp_replicate"] * self.dp_replicate_enabled + ["dp_shard_cp"])
    data_parallel_size = property(lambda self: (self.dp_replicate_size or 1) * (self.dp_shard_size or 1))
    non_data_parallel_size = property(lambda self: (self.tp_size or 1) * (self.cp_size or 1) * (self.sp_size or 1))
    total_size = property(lambda self: self.data_parallel_size * self.non_data_parallel_size)
