"""The names of DeepSpeed, and what of ours stands for each.

    names.txt       public names of DeepSpeed, by module: what exists, and so may be imported
    constants.txt   its constants, with their values
    _CARRIED        those that do something here, by the module of ours that has them
    the rest        raise `CompatError` when they are used; `native_way` says what to do instead

A name means the same in all modules that have it, unless it is listed under a module of theirs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paceline_deepspeed.constants import literals
from paceline_doors.names import first_way, listed, targets

VERSION = "0.19.8"
ABOUT: dict[str, object] = {
    "__version_major__": 0,
    "__version_minor__": 19,
    "__version_patch__": 8,
    "__git_hash__": "unknown",
    "__git_branch__": "unknown",
}
# Commands of an installed door -> what runs them.
COMMANDS = {"deepspeed": "paceline_deepspeed.command:main"}
IMPORTED_WITH: dict[str, str] = {}  # `from deepspeed import *` gives names and no modules

_HERE = "paceline_deepspeed"
# Module of ours -> names; `theirs=ours` where ours is called otherwise. Where a name means this in some modules alone:
# {"deepspeed.comm deepspeed.comm.comm": names}, modules of theirs -> names.
_CARRIED: dict[str, str | dict[str, str]] = {
    _HERE: "version=VERSION",
    f"{_HERE}.initialize": "add_config_arguments initialize",
    f"{_HERE}.processes": "init_distributed",
    f"{_HERE}.config_attributes": "DeepSpeedConfig=ConfigAttributes get_monitor_config",
    f"{_HERE}.monitors": "MonitorMaster",
    f"{_HERE}.engine": "DeepSpeedEngine",
    f"{_HERE}.offload_states": "OffloadDeviceEnum OffloadStateTypeEnum get_state_devices",
    f"{_HERE}.optimizers": "DeepSpeedCPUAdagrad DeepSpeedCPUAdam DeepSpeedCPULion FusedAdam FusedLamb FusedLion",
    "paceline.optim.optimizer": "DeepSpeedOptimizer=PreparedOptimizer",
    "paceline.data.loader": "DeepSpeedDataLoader=PreparedLoader",
    "paceline.data.seed": "set_random_seed=set_seed",
    # What stands in an `except` has to be a class of exceptions.
    "paceline.base.errors": "AffineTransferError=PacelineError DeepSpeedConfigError=ConfigError "
    "DeprecatedException=PacelineError InvalidMapError=PacelineError InvalidReplicaPolicyError=PacelineError "
    "PipelineError=PacelineError UnsupportedLayoutError=PacelineError ZeRORuntimeException=PacelineError",
    f"{_HERE}.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    f"{_HERE}.pipe_engine": "PipelineEngine",
    f"{_HERE}.profiling": "log_summary",
    f"{_HERE}.tensor_parallel": "tp_model_init",
    f"{_HERE}.tiling": "TiledFusedLogitsLoss TiledLinear TiledMLP sequence_tiled_compute",
    f"{_HERE}.timers": "SynchronizedWallClockTimer",
    f"{_HERE}.flops_profiler": "FlopsProfiler duration_to_string flops_to_string get_model_profile macs_to_string "
    "number_to_string params_to_string",
    f"{_HERE}.comm": {
        "deepspeed.comm deepspeed.comm.comm deepspeed.comm.torch": "P2POp ProcessGroup ReduceOp all_gather "
        "all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all "
        "all_to_all_single allgather_fn barrier batch_isend_irecv broadcast broadcast_object_list configure "
        "destroy_process_group gather get_all_ranks_from_group get_global_rank get_local_rank get_local_rank_from_launcher "
        "get_rank get_world_group get_world_rank_from_launcher get_world_size get_world_size_from_launcher "
        "has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor "
        "get_logged_comm_ops has_comm_data in_aml in_aws_sm in_dlts inference_all_reduce initialize_mesh_device irecv "
        "is_available is_initialized isend monitored_barrier new_group "
        "recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor reset_log scatter send"
    },
    f"{_HERE}.process_groups": "_clone_world_group=get_world_group _get_broadcast_src_rank=get_broadcast_src_rank "
    "_get_data_parallel_group=get_data_parallel_group _get_data_parallel_group_ranks=get_data_parallel_ranks "
    "_get_data_parallel_rank=get_data_parallel_rank _get_data_parallel_world_size=get_data_parallel_world_size "
    "_get_model_parallel_world_size=get_model_parallel_world_size "
    "_get_sequence_data_parallel_group=get_sequence_data_parallel_group "
    "_get_sequence_data_parallel_rank=get_sequence_data_parallel_rank "
    "_get_sequence_data_parallel_world_size=get_sequence_data_parallel_world_size "
    "_get_sequence_parallel_group=get_sequence_parallel_group _get_sequence_parallel_rank=get_sequence_parallel_rank "
    "_get_sequence_parallel_world_size=get_sequence_parallel_world_size "
    "expert_tensor_parallel_world_size mesh_device "
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
    "get_model_parallel_world_size get_tensor_model_parallel_rank=get_model_parallel_rank "
    "get_tensor_model_parallel_world_size=get_model_parallel_world_size",
    f"{_HERE}.op_builders": "ALL_OPS AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder "
    "FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder OpBuilder QuantizerBuilder RandomLTDBuilder "
    "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
    f"{_HERE}.helpers": "ZeroStageEnum clip_grad_norm_ clone_tensors_for_torch_save detach_variable ensure_directory_exists "
    "get_global_norm has_moe_layers is_moe_param is_moe_param_group is_zero_param move_to_device "
    "split_params_into_different_moe_groups_for_optimizer",
    f"{_HERE}.zero": "GatheredParameters Init ZeroParamStatus ZeroParamType register_external_parameter "
    "unregister_external_parameter",
    f"{_HERE}.values": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state",
    f"{_HERE}.checkpointing": {
        "deepspeed.checkpointing deepspeed.runtime.activation_checkpointing.checkpointing": "CudaRNGStatesTracker checkpoint "
        "configure get_cuda_rng_tracker is_configured model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
        "non_reentrant_checkpoint partition_activations_in_checkpoint reset set_num_layers"
    },
    f"{_HERE}.surroundings": "OnDevice RepeatingLoader get_z3_leaf_modules instrument_w_nvtx log_dist log_dist_once logger "
    "recursive_getattr recursive_setattr remove_random_ltd_state_dict save_without_random_ltd "
    "see_memory_usage set_log_level_from_string set_z3_leaf_module set_z3_leaf_modules "
    "unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    f"{_HERE}.consolidation": "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
    "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    f"{_HERE}.ds_to_universal": {"deepspeed.checkpoint.ds_to_universal": "main parse_arguments"},
    f"{_HERE}.partition": {"deepspeed.runtime.utils": "partition_balanced=balanced partition_uniform=uniform"},
    f"{_HERE}.runner": {
        "deepspeed.launcher.runner": "DLTS_HOSTFILE encode_world_info fetch_hostfile parse_args parse_inclusion_exclusion "
        "parse_resource_filter"
    },
    f"{_HERE}.device": "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported",
    f"{_HERE}.topology": "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology",
    f"{_HERE}.schedules": "LRRangeTest LR_RANGE_TEST ONE_CYCLE OneCycle TOTAL_NUM_STEPS VALID_LR_SCHEDULES "
    "WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR "
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
        'say how many ranks divide each layer in the config: `"tensor_parallel": {"autotp_size": 2}`',
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
        r"Hybrid|Rollout|ZenFlow|SuperOffload|DualPipe|Domino|Transformer|ReturnBias|Swap|AIO|aio",
        "this engine or kernel of DeepSpeed's is not carried",
        "use `deepspeed.initialize` with `zero_optimization`, whose `offload_*` keys move states to the host",
    ),
    (
        r"^estimate_zero",
        "this formula counts DeepSpeed's copies and buffers, which are others here",
        "run `paceline plan script.py`, which counts what a plan needs on a device",
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


def after_install(*, newly: bool, found_before: bool) -> None:
    """Does nothing: nothing beside DeepSpeed needs a change."""


def notices() -> list[str]:
    """Returns nothing: no library is used beside DeepSpeed."""
    return []


def modules() -> dict[str, frozenset[str]]:
    """Names of DeepSpeed's modules, each with its public names."""
    return listed(Path(__file__).with_name("names.txt"))


def imports() -> dict[str, dict[str, str]]:
    """Returns nothing: no module of others is looked up in DeepSpeed's."""
    return {}


@cache
def carried() -> dict[str, str]:
    """Maps each name of theirs, with its module where it means this there alone, to "module:name" of ours."""
    return {name: f"{_HERE}.constants:{name}" for name in literals()} | targets(_CARRIED)


def native_way(name: str) -> tuple[str, str]:
    """Returns why a name, given with its module, is not carried, and what to do instead."""
    return first_way(name.rpartition(".")[2], _NATIVE_WAYS, _DEFAULT_WAY)
