"""`ConfigView`: the engine's many small questions about its config, its batch and its place among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.accelerator import Accelerator
from paceline_deepspeed import native_way
from paceline_deepspeed.config import Batch, DeepSpeedConfig
from paceline_deepspeed.config_attributes import ConfigAttributes
from paceline_doors.absent import refuse

# Name of a method of DeepSpeed's -> key of the config.
_KEYS = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "scheduler_name": "scheduler.type",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zenflow_config": "zero_optimization.zenflow",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
}
# The same for methods that end as their key does: how the method begins, how the key begins, and the ends of both.
_ALIKE = (
    ("", "", """dataloader_drop_last dump_state gradient_clipping gradient_predivide_factor managed_gradient_accumulation
        memory_breakdown steps_per_print zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"""),
    ("autotuning_", "autotuning.", "enabled end_profile_step metric start_profile_step"),
    ("flops_profiler_", "flops_profiler.", """detailed enabled module_depth output_file profile_step
        recompute_fwd_factor top_modules"""),
    ("zero_", "zero_optimization.stage3_", """allgather_sequential gather_16bit_weights_on_model_save
        max_live_parameters max_reuse_distance model_persistence_threshold module_granularity_threshold
        param_persistence_threshold prefetch_bucket_size"""),
    ("zero_", "zero_optimization.", """allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients
        elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
        parameter_alignment reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
        sub_group_size"""),
)  # fmt: skip

# Methods that ask whether something runs which a config cannot switch on here.
_OFF = (
    "checkpoint_writer_enabled curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled is_deepcompile_active "
    "is_deepcompile_enabled random_ltd_enabled uses_parallelization_pass_only"
)

# Attributes about what is not carried, by the type of their empty value.
_EMPTY: dict[type, str] = {
    bool: "dont_change_device has_moe_layers optimized_linear_base_weight_sharding optimized_linear_lora_enabled use_ds_comm "
    "zenflow",
    dict: "expert_data_parallel_group expert_parallel_group",
    list: "gate_modules moe_layers num_experts",
    NoneType: "all_to_all_group local_all_to_all_group losses mesh_device torch_autocast_z0_gradscaler",
}

# Methods on ZeRO's own buffers and on features that are not carried: using one is refused.
_REFUSED = (
    "aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback "
    "clip_fp32_gradients coalesce_grad_reduction compile_autosp compile_autotp compile_zero_optimization_stage "
    "cpuadam_cores_perc curriculum_learning_config data_efficiency_config data_sampling_config get_autosp_backend "
    "get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend get_optimizer_configuration "
    "get_sequence_parallel_group load_moe_state_dict print_forward_breakdown random_ltd_config "
    "random_ltd_initialize register_compile_pass set_custom_curriculum_learning_schedule "
    "set_data_post_process_func sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain "
    "swap_tensor_config tensor_parallel_config"
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CAST_MODULES = ["Linear", "Conv1d", "Conv2d", "Conv3d"]  # what DeepSpeed's autocast covers by itself


class ConfigView:
    """Answers, by DeepSpeed's names of methods, what a config says. The engine looks up here what it has no name for.

    Args:
        accelerator: the run.
        config: what was asked for.
        batch: the batch triangle.

    Attributes:
        attributes: the same as an object, which `engine._config` is.
    """

    def __init__(self, accelerator: Accelerator, config: DeepSpeedConfig, batch: Batch) -> None:
        self.accelerator = accelerator
        self.config = config
        self.batch = batch
        self.attributes = ConfigAttributes.of_engine(config, self)

    # -- the batch -------------------------------------------------------------------------------------------------

    def rebatch(self, batch: Batch) -> None:
        """Takes another batch triangle from the next window on."""
        self.batch = batch

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulate

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns the global batch, the micro-batch and the number of micro-batches in a step."""
        return self.batch.train, self.batch.micro, self.batch.accumulate

    # -- ZeRO and precision ----------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        return bool(self.config["zero_optimization.stage"])

    def zero_optimization_partition_gradients(self) -> bool:
        return int(self.config["zero_optimization.stage"]) >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return int(self.config["zero_optimization.stage"]) >= 3

    def zero_cpu_offload(self) -> bool:
        return self._offload_device() == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._offload_device() == "nvme"

    def zero_use_cpu_optimizer(self) -> bool:
        return self._offload_device() != "none"

    def _offload_device(self) -> str:
        if self.config["zero_optimization.cpu_offload"]:  # the older key
            return "cpu"
        return str(self.config["zero_optimization.offload_optimizer.device"])

    def zero_offload_optimizer(self) -> SimpleNamespace | None:
        """Returns the config's block for moved optimizer states; None where they are not moved."""
        return self._offload("optimizer", self._offload_device())

    def zero_offload_param(self) -> SimpleNamespace | None:
        """Returns the config's block for moved parameters; None where they are not moved."""
        device = self.config["zero_optimization.offload_param.device"]
        if self.config["zero_optimization.cpu_offload_param"]:  # the older key
            device = "cpu"
        return self._offload("param", device)

    def _offload(self, what: str, device: str) -> SimpleNamespace | None:
        if device == "none":
            return None
        block = self.config[f"zero_optimization.offload_{what}"].values
        return SimpleNamespace(**{**block, "device": device})

    def zero_overlap_comm(self) -> bool:
        """Whether gradients are sent during the backward pass; by default at stage 3 alone."""
        chosen = self.config["zero_optimization.overlap_comm"]
        if chosen is None:
            return self.zero_optimization_partition_weights()
        return bool(chosen)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of the model and of the gradients' sums in the config; masters are float32 here."""
        model = self._model_dtype()
        return _DTYPES[model], _DTYPES[self.config["data_types.grad_accum_dtype"] or model]

    def _model_dtype(self) -> str:
        if self.config["fp16.enabled"]:
            return "fp16"
        if self.config["bf16.enabled"]:
            return "bf16"
        return "fp32"

    @property
    def communication_data_type(self) -> torch.dtype:
        return _DTYPES[self.config["communication_data_type"] or self._model_dtype()]

    def postscale_gradients(self) -> bool:
        return not self.config["prescale_gradients"]

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """None where autocast is not asked for."""
        if not self.config["torch_autocast.enabled"]:
            return None
        return _DTYPES[self.config["torch_autocast.dtype"]]

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Names of classes."""
        chosen: list[str] = self.config["torch_autocast.lower_precision_safe_modules"]
        if chosen:
            return chosen
        return [f"{getattr(torch.nn, name).__module__}.{name}" for name in _CAST_MODULES]

    def dynamic_loss_scale(self) -> bool:
        return not self.config["fp16.loss_scale"]

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Returns the settings of the dynamic loss scale."""
        fp16 = self.config["fp16"]
        return {
            "init_scale": 2 ** fp16["initial_scale_power"],
            "scale_window": fp16["loss_scale_window"],
            "delayed_shift": fp16["hysteresis"],
            "consecutive_hysteresis": fp16["consecutive_hysteresis"],
            "min_scale": fp16["min_loss_scale"],
        }

    def initial_dynamic_scale(self) -> float:
        return float(self.config["fp16.loss_scale"] or 2.0 ** self.config["fp16.initial_scale_power"])

    def loss_scale(self) -> float:
        """The loss scale of the next backward pass; 1 without fp16."""
        if self.accelerator.scaler is None:
            return 1.0
        return float(self.accelerator.scaler.loss_scale)

    cur_scale = property(loss_scale)

    def amp_enabled(self) -> bool:
        """apex's mixed precision is not carried."""
        return False

    # -- other parts of the config ---------------------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """Returns the optimizer's type, in small letters where it is one of DeepSpeed's own."""
        return self.attributes.optimizer_name

    def optimizer_params(self) -> Any:
        """None where the config names no optimizer."""
        if not self.config["optimizer.type"]:
            return None
        return self.config["optimizer.params"]

    def scheduler_params(self) -> Any:
        """None where the config names no scheduler."""
        if not self.config["scheduler.type"]:
            return None
        return self.config["scheduler.params"]

    def wall_clock_breakdown(self) -> bool:
        """Whether times are told; also where operations are counted."""
        return bool(self.config["wall_clock_breakdown"] or self.config["flops_profiler.enabled"])

    def log_level(self) -> str | None:
        """None where the config does not say it."""
        if "log_level" not in self.config.places:
            return None
        return str(self.config["log_level"])

    def checkpoint_tag_validation_enabled(self) -> bool:
        return str(self.config["checkpoint.tag_validation"]).upper() != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        return str(self.config["checkpoint.tag_validation"]).upper() == "FAIL"

    def autotuning_metric_path(self) -> str:
        return self.config["autotuning.metric_path"] or str(Path.cwd() / "autotuning_metric.json")

    def autotuning_model_info_path(self) -> str:
        return self.config["autotuning.model_info_path"] or str(Path.cwd() / "autotuning_model_info.json")

    def autotuning_profile_model_info(self) -> bool:
        info = self.config["autotuning.model_info"] or {}
        return bool(self.config["autotuning.enabled"] and info.get("profile", False))

    # -- the ranks -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def global_rank(self) -> int:
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        return self.accelerator.local_process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def dp_world_size(self) -> int:
        """How many ranks read different samples."""
        return self.accelerator.plan.layout.width

    seq_dp_world_size = dp_world_size

    @property
    def mp_world_size(self) -> int:
        """How many ranks share the layers of a model."""
        return self.accelerator.plan.layout.tp

    @property
    def data_parallel_group(self) -> Any:
        """The group of the ranks that read different samples."""
        group = self.accelerator.run.mesh.data_group
        return dist.group.WORLD if group is None else group

    seq_data_parallel_group = data_parallel_group

    @property
    def sequence_parallel_size(self) -> int:
        """How many ranks share each sequence."""
        return self.accelerator.plan.layout.cp

    @property
    def dist_backend(self) -> str | None:
        """Name of torch's backend; None where a process is alone."""
        return dist.get_backend() if dist.is_initialized() else None

    def get_model_parallel_rank(self) -> int:
        """Its place among the ranks that share the layers of a model."""
        return self.accelerator.plan.layout.coordinate(self.accelerator.process_index)["tp"]

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        """How many ranks divide the matrices of a layer, as the config says; 0 if it says nothing."""
        return int(self.config["tensor_parallel.autotp_size"])

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank keeps a part of the first copy of the parameters: all do at stage 3, which has one copy."""
        return self.zero_optimization_partition_weights()

    def get_data_parallel_rank(self) -> int:
        """Which share of each batch this rank reads."""
        return self.accelerator.plan.layout.data_index(self.accelerator.process_index)


def _getter(key: str) -> Callable[[Any], Any]:
    """Makes a method that reads one key; a function written in the loop below would read the loop's last key."""

    def get(self: ConfigView) -> Any:
        return self.config[key]

    get.__doc__ = f"`{key}` of the config."
    return get


def _empty(kind: type) -> property:
    """Makes an attribute that is empty, a new value each time."""
    return property(lambda self: kind())


for _kind, _names in _EMPTY.items():
    for _name in _names.split():
        setattr(ConfigView, _name, _empty(_kind))
for _name, _key in _KEYS.items():
    setattr(ConfigView, _name, _getter(_key))
for _start, _key_start, _ends in _ALIKE:
    for _end in _ends.split():
        setattr(ConfigView, _start + _end, _getter(_key_start + _end))


def _never(self: ConfigView) -> bool:
    """Returns False: no config switches this on here."""
    return False


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refused(self: ConfigView, *args: Any, **keywords: Any) -> NoReturn:
        refuse(f"DeepSpeedEngine.{name}", *native_way(name))

    refused.__doc__ = "Is not carried."
    return refused


for _name in _OFF.split():
    setattr(ConfigView, _name, _never)
for _name in _REFUSED.split():
    setattr(ConfigView, _name, _refusal(_name))
