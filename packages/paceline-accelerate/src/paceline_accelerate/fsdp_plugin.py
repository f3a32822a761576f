"""accelerate's `FullyShardedDataParallelPlugin`: fields that are left None are filled from FSDP_* variables, then by defaults.

    FSDP_SHARDING_STRATEGY=2       -> ShardingStrategy.SHARD_GRAD_OP          version 1
    FSDP_VERSION=2                 -> reshard_after_forward=True, no sharding_strategy
    state_dict_type="sharded..."   -> StateDictType.SHARDED_STATE_DICT and its two configs

The table in `engine_fields` says what becomes of each field in a plan.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from paceline.base import env as environment
from paceline.base.log import warn_once
from paceline_accelerate.engine_fields import PLUGIN
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.said_fields import SaidFields
from paceline_accelerate.word_lists import FSDP_AUTO_WRAP_POLICY

_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SWITCHES = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
# Fields that version 2 of FSDP does not have.
_OF_VERSION_1 = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")


@dataclass
class FullyShardedDataParallelPlugin(SaidFields):
    """The options of FSDP, under accelerate's names."""

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
        said = self.fill_from_environment(PLUGIN)
        self._drop_fields_of_other_policies()
        self.fsdp_version = int(self.fsdp_version or 1)
        self._set_sharding()
        for name in _SWITCHES:
            setattr(self, name, _is_true(getattr(self, name)))
        if self.fsdp_version == 1:
            for name in ("use_orig_params", "sync_module_states", "forward_prefetch"):
                setattr(self, name, _is_true(getattr(self, name)))
            self.backward_prefetch = _prefetch(self.backward_prefetch)
        else:
            self._drop_version_1(said)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("`activation_checkpointing_offload=True` requires `activation_checkpointing=True`.")
        if self.mixed_precision_policy is not None:
            self._set_policy(self.mixed_precision_policy)
        self._set_wrapping()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.cpu_ram_efficient_loading and self.fsdp_version == 1 and not self.sync_module_states:
            warnings.warn(
                "sync_module_states cannot be False with cpu_ram_efficient_loading: it is set to True.", stacklevel=3
            )
            self.sync_module_states = True
        self.remember(said)

    def _drop_fields_of_other_policies(self) -> None:
        """Drops what the launcher's variables say for another wrapping policy than this one: it may set them with any."""
        policy = str(self.auto_wrap_policy).upper()
        for name, needed in (
            ("transformer_cls_names_to_wrap", "TRANSFORMER_BASED_WRAP"),
            ("min_num_params", "SIZE_BASED_WRAP"),
        ):
            if name in self.from_environment and policy != needed:
                setattr(self, name, None)

    def _set_sharding(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        if self.fsdp_version == 1:
            strategy = "FULL_SHARD" if self.sharding_strategy is None else self.sharding_strategy
            self.sharding_strategy = _member(ShardingStrategy, strategy)
            if "reshard_after_forward" in self.from_environment:
                self.reshard_after_forward = None
            if isinstance(self.reshard_after_forward, bool):
                raise ValueError(
                    f"reshard_after_forward={self.reshard_after_forward} is not supported with FSDP1: set it to a word such as "
                    "'FULL_SHARD', or pass fsdp_version=2."
                )
            if self.reshard_after_forward is not None:
                self.reshard_after_forward = _member(ShardingStrategy, self.reshard_after_forward)
            return
        if self.reshard_after_forward is None:
            if self.sharding_strategy is not None and "sharding_strategy" not in self.from_environment:
                raise ValueError(
                    "sharding_strategy is not supported with FSDP2: set reshard_after_forward to a bool (True or False)."
                )
            self.reshard_after_forward = True
        if not isinstance(self.reshard_after_forward, (bool, str)):
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward!r} is not supported with FSDP2: set a bool."
            )
        self.reshard_after_forward = _is_true(self.reshard_after_forward)

    def _drop_version_1(self, said: dict[str, Any]) -> None:
        _prefetch(self.backward_prefetch)  # a word that names none is refused under both versions
        is_script_s = "forward_prefetch" not in self.from_environment
        if is_script_s and self.forward_prefetch is not None:
            raise ValueError("forward_prefetch is not supported with FSDP2: leave it out, or pass fsdp_version=1.")
        for name in _OF_VERSION_1:
            if name in said and name not in self.from_environment:
                warn_once("compat", f"FullyShardedDataParallelPlugin({name}=...) is for version 1 of FSDP alone.")
            setattr(self, name, None)

    def _set_wrapping(self) -> None:
        from torch.distributed.fsdp import wrap

        policy = self.auto_wrap_policy
        if policy is None or callable(policy):
            return
        word = str(policy).upper()
        if word not in FSDP_AUTO_WRAP_POLICY:
            raise ValueError(f"Invalid auto wrap policy: {policy}. Must be one of {FSDP_AUTO_WRAP_POLICY}")
        if word == "NO_WRAP":
            self.auto_wrap_policy = None
        elif word == "TRANSFORMER_BASED_WRAP":
            self.auto_wrap_policy = wrap.transformer_auto_wrap_policy
            if isinstance(self.transformer_cls_names_to_wrap, str):
                self.transformer_cls_names_to_wrap = self.transformer_cls_names_to_wrap.split(",")
        else:
            self.auto_wrap_policy = wrap.size_based_auto_wrap_policy
            self.min_num_params = int(self.min_num_params or 0)

    # -- setters ---------------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Sets the type of state dict; the default is a full state for version 1 and a sharded state for version 2.

        The two configs are made only if there are none: like accelerate, a later call does not change them with the type.
        """
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.state_dict_type = _member(StateDictType, state_dict_type or self.state_dict_type or default)
        if self.fsdp_version == 2 and self.state_dict_type == StateDictType.LOCAL_STATE_DICT:
            raise CompatValueError(
                "compat-argument",
                "FSDP2 does not support LOCAL_STATE_DICT as state_dict_type.",
                why="fsdp_version=2, which has whole and divided states alone",
                fix="write state_dict_type='SHARDED_STATE_DICT'",
            )
        if self.state_dict_type == StateDictType.FULL_STATE_DICT:
            model_config: Any = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            optimizer_config: Any = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        elif self.state_dict_type == StateDictType.SHARDED_STATE_DICT:
            model_config = ShardedStateDictConfig(offload_to_cpu=True)
            optimizer_config = ShardedOptimStateDictConfig(offload_to_cpu=True)
        else:
            return
        if self.state_dict_config is None:
            self.state_dict_config = model_config
        if self.optim_state_dict_config is None:
            self.optim_state_dict_config = optimizer_config

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Binds the wrapping policy to the classes of a model, or to the number of parameters, that the fields name.

        Raises:
            CompatValueError: `compat-argument`, if the model has no module of one of the classes.
        """
        from torch.distributed.fsdp import wrap

        from paceline_accelerate.module_classes import classes_of_units

        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            classes = set(classes_of_units(self.transformer_cls_names_to_wrap, model))
            self.auto_wrap_policy = functools.partial(self.auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            if self.min_num_params:
                self.auto_wrap_policy = functools.partial(self.auto_wrap_policy, min_num_params=self.min_num_params)
            else:
                self.auto_wrap_policy = None

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the mixed-precision policy, if there is none or with `override`.

        Args:
            mixed_precision: "fp16", "bf16", "fp8" or "fp32", or a dtype.
            buffer_autocast: whether buffers stay in float32 (version 1).
            override: whether an existing policy is replaced.
        """
        if self.mixed_precision_policy is None or override:
            self._set_policy(mixed_precision, buffer_autocast)

    def _set_policy(self, mixed_precision: Any, buffer_autocast: bool = False) -> None:
        if isinstance(mixed_precision, str):
            if mixed_precision not in _DTYPES:
                raise ValueError(f"Invalid mixed precision: {mixed_precision}. Must be one of {list(_DTYPES)}")
            mixed_precision = _DTYPES[mixed_precision]
        elif isinstance(mixed_precision, dict):
            self._check_policy(mixed_precision)
        values = mixed_precision
        if isinstance(mixed_precision, torch.dtype):
            values = dict.fromkeys(self._policy_fields(), mixed_precision)
            if buffer_autocast and self.fsdp_version == 1:
                values["buffer_dtype"] = torch.float32
        if isinstance(values, dict):
            self.mixed_precision_policy = self._policy_kind()(**values)
        else:
            self.mixed_precision_policy = values
        self.validate_mixed_precision_policy()

    def _policy_fields(self) -> list[str]:
        """Lists the fields of this version's policy that hold a dtype."""
        return ["param_dtype", "reduce_dtype", "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"]

    def _check_policy(self, values: dict[str, Any]) -> None:
        keys = self._policy_fields()
        allowed = list(_DTYPES.values())
        if set(values) != set(keys) or any(value not in allowed for value in values.values()):
            raise ValueError(
                f"Invalid mixed precision policy: {values}. Must be a `dict` with keys {keys}. Values must be one of {allowed}"
            )

    def _policy_kind(self) -> Any:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        return MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy

    def validate_mixed_precision_policy(self) -> None:
        """Checks that the policy has the class of this version.

        Raises:
            ValueError: the policy is for the other version.
        """
        self._check_class("mixed_precision_policy", self._policy_kind())

    def set_cpu_offload(self) -> None:
        """Replaces a boolean `cpu_offload` by torch's object for this version."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        is_variable = "cpu_offload" in self.from_environment and isinstance(self.cpu_offload, str)
        if is_variable or isinstance(self.cpu_offload, bool) or self.cpu_offload is None:
            offloads = _is_true(self.cpu_offload)
            if self.fsdp_version == 1:
                self.cpu_offload = CPUOffload(offload_params=offloads)
            else:
                self.cpu_offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Checks that `cpu_offload` has the class of this version.

        Raises:
            ValueError: the object is for the other version.
        """
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        self._check_class("cpu_offload", CPUOffload if self.fsdp_version == 1 else OffloadPolicy)

    def _check_class(self, field: str, kind: type) -> None:
        """Refuses a value that is made for the other version of FSDP."""
        value = getattr(self, field)
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"`{field}` must be an instance of `torch.distributed.fsdp.{kind.__name__}` in FSDP{self.fsdp_version}, and "
                f"it is {value!r}."
            )


def _is_true(value: object) -> bool:
    """Converts a value of a script, or the text of a variable, to a boolean."""
    return environment.parse_bool(value) if isinstance(value, str) else bool(value)


def _member(kind: Any, value: object) -> Any:
    """Returns a member of one of torch's enumerations, by number or by name.

    Raises:
        ValueError: no member has this number.
        KeyError: none has this name.
    """
    if isinstance(value, Enum):
        return value
    text = str(value).upper()
    if text.isdigit():
        return kind(int(text))
    if f"_{text}" in kind.__members__:  # torch's own name of HYBRID_SHARD_ZERO2
        text = f"_{text}"
    return kind[text]


def _prefetch(value: object) -> Any:
    from torch.distributed.fsdp import BackwardPrefetch

    if value is None or (isinstance(value, str) and value.upper() == "NO_PREFETCH"):
        return None
    return _member(BackwardPrefetch, value)
