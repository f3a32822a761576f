"""`Getters`: the engine's many small questions about its config and its place among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.accelerator import Accelerator
from paceline.compat.deepspeed.config import Batch, DeepSpeedConfig

# Name of a method of DeepSpeed's -> key of the config.
_KEYS = {
    "bfloat16_enabled": "bf16.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "fp16_enabled": "fp16.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "log_level": "log_level",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


class Getters:
    """Answers from `config`, `batch` and `accelerator`; part of the engine."""

    accelerator: Accelerator
    config: DeepSpeedConfig
    batch: Batch

    # -- the batch -------------------------------------------------------------------------------------------------

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the micro-batch and the step that ended last, by DeepSpeed's names."""
        return dict(self.events.timers.last)

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulate

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three of them: train, micro, accumulation."""
        return self.batch.train, self.batch.micro, self.batch.accumulate

    # -- ZeRO and precision ----------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        return bool(self.config["zero_optimization.stage"])

    def zero_optimization_partition_gradients(self) -> bool:
        return int(self.config["zero_optimization.stage"]) >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return int(self.config["zero_optimization.stage"]) >= 3

    def zero_cpu_offload(self) -> bool:
        return self.config["zero_optimization.offload_optimizer.device"] == "cpu"

    def dynamic_loss_scale(self) -> bool:
        return bool(self.config["fp16.enabled"]) and not self.config["fp16.loss_scale"]

    def initial_dynamic_scale(self) -> float:
        return float(self.config["fp16.loss_scale"] or 2.0 ** self.config["fp16.initial_scale_power"])

    def loss_scale(self) -> float:
        """The loss scale of the next backward pass; 1 without fp16."""
        return 1.0 if self.accelerator.scaler is None else float(self.accelerator.scaler.loss_scale)

    cur_scale = property(loss_scale)

    def amp_enabled(self) -> bool:
        """apex's mixed precision is not carried."""
        return False

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

    def get_data_parallel_rank(self) -> int:
        """Which share of each batch this rank reads."""
        return self.accelerator.plan.layout.data_index(self.accelerator.process_index)


def _getter(key: str) -> Callable[[Any], Any]:
    def get(self: Getters) -> Any:
        return self.config[key]

    get.__doc__ = f"`{key}` of the config."
    return get


for _name, _key in _KEYS.items():
    setattr(Getters, _name, _getter(_key))
