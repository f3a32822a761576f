"""The names of Hugging Face accelerate, and what of ours stands for each.

    names.txt       every public name of accelerate 1.15, by module: what exists, and so may be imported
    _CARRIED        those that do something here, by the module of ours that has them
    the rest        raise `CompatError` when they are used; `native_way` says what to do instead

A name means the same wherever the library offers it, so one table serves all of its modules.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from paceline.compat.names import listed

VERSION = "1.15.0"

_HERE = "paceline.compat.accelerate"
# Module -> names; `theirs=ours` where ours is called otherwise.
_CARRIED = {
    f"{_HERE}.accelerator": "Accelerator",
    f"{_HERE}.arguments": """AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs
        GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration""",
    f"{_HERE}.plugins": """DeepSpeedPlugin DeepSpeedSequenceParallelConfig FullyShardedDataParallelPlugin ParallelismConfig
        TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin""",
    f"{_HERE}.sharded": """disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading fsdp2_canonicalize_names
        load_fsdp_model load_fsdp_optimizer merge_fsdp_weights model_has_dtensor save_fsdp_model save_fsdp_optimizer""",
    f"{_HERE}.kinds": """BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType
        DynamoBackend FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType""",
    f"{_HERE}.state": "AcceleratorState PartialState ThreadLocalSharedDict do_nothing is_initialized",
    f"{_HERE}.gradient_state": "GradientState",
    f"{_HERE}.scheduler": "AcceleratedScheduler",
    f"{_HERE}.optimizer": "AcceleratedOptimizer move_to_device patch_optimizer_step",
    f"{_HERE}.errors": "DistributedOperationException",
    f"{_HERE}.nested": """ConvertOutputsToFp32 TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TensorInformation concatenate
        convert_outputs_to_fp32 convert_to_fp32 find_batch_size find_device get_data_structure get_shape honor_type
        ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information is_torch_tensor
        is_torch_xpu_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors""",
    f"{_HERE}.loaders": "DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin prepare_data_loader skip_first_batches",
    f"{_HERE}.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers",
    "paceline.launch.notebook": "debug_launcher notebook_launcher",
    f"{_HERE}.operations": """CannotPadNestedTensorWarning GatheredParameters broadcast broadcast_object_list
        chained_operation copy_tensor_to_devices gather gather_object gather_tensor_shape pad_across_processes reduce
        verify_operation wait_for_everyone""",
    f"{_HERE}.modeling": """clean_device_map compute_module_sizes convert_bytes convert_file_size_to_int
        dtype_byte_size find_tied_parameters get_max_layer_size get_max_memory id_tensor_storage init_empty_weights
        init_on_device load_checkpoint_in_model load_state_dict named_module_tensors retie_parameters
        set_module_tensor_to_device""",
    f"{_HERE}.surroundings": """STR_OPERATION_TO_FUNC are_libraries_initialized clear_environment compare_versions
        default_config_file get_pretty_name is_peft_model is_port_in_use is_torch_version is_tqdm_available load
        merge_dicts parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment
        recursive_getattr save str_to_bool tqdm write_basic_config""",
    f"{_HERE}.constants": """BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION
        BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES
        DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION
        FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME
        FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
        MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME
        SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION
        SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES
        TORCH_LAUNCH_PARAMS TORCH_SAFE_GLOBALS TYPE_CHECKING WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
    "paceline.data.seed": "set_seed",
    f"{_HERE}.rank_logger": "MultiProcessAdapter get_logger",
    f"{_HERE}.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    f"{_HERE}.random_streams": "synchronize_rng_state synchronize_rng_states",
    f"{_HERE}.wrapping": """clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 extract_model_from_parallel get_model_tp_size get_module_children_bottom_up
        has_compiled_regions has_repeated_blocks is_compiled_module is_repeated_blocks""",
    f"{_HERE}.host": """CPUInformation USE_TORCH_XLA check_cuda_fp8_capability check_cuda_p2p_ib_support
        check_os_kernel convert_dict_to_env_variables deepspeed_required get_cpu_distributed_information
        get_current_device_type get_driver_version get_free_port get_gpu_info get_int_from_env install_xla
        is_habana_gaudi1 override_numa_affinity set_numa_affinity torchao_required""",
    f"{_HERE}.checkpoint_functions": """load_accelerator_state load_custom_state save_accelerator_state
        save_custom_state""",
    "paceline.optim.local_sgd": "LocalSGD",
}

# First match counts: pattern of a name, why it is not carried, what to do.
_NATIVE_WAYS = (
    (
        "HfDeepSpeedConfig",
        "transformers' Trainer would drive DeepSpeed through it, and here it trains through accelerate alone",
        "leave `deepspeed=` out of TrainingArguments, and say the stage at the start: `paceline launch --compat accelerate "
        "--shard auto --zero 2`",
    ),
    (
        r"fsdp|FSDP|DeepSpeed|deepspeed|Dummy|DDP2",
        "parameters are divided when a model is prepared, by the plan",
        "native: `paceline.Accelerator(plan={'shard': 4})`",
    ),
    (
        r"Megatron|megatron|TrainStep|pippy|[Tt]ensorParallel|ContextParallel|SequenceParallel",
        "tensor, context and pipeline parallel are axes of a plan here, not plugins",
        "native: `paceline.Accelerator(plan={'tp': 2, 'pp': 2})`",
    ),
    (
        r"fp8|FP8|RecipeKwargs|[Tt]ransformer_?[Ee]ngine|MSAMP|msamp|_ao|AORecipe",
        "8-bit training is not built yet",
        "use mixed_precision='bf16'",
    ),
    (
        r"Dynamo|compile",
        "the repeated blocks are compiled when a model is prepared",
        "native: `paceline.Accelerator(plan={'compile': True})`, or call `torch.compile(model)` before `prepare`",
    ),
    (
        r"offload|Offload|dispatch|device_map|Hook|hook|balanced_memory|layer|PrefixedDataset|[Aa]lign",
        "models that do not fit one device are divided by a plan, not moved about by hooks",
        "native: `paceline.Accelerator(plan={'shard': 4})`, or load the model on one device",
    ),
    (r"Bnb|bnb|quantize|bit", "quantised models are not carried", "load the model unquantised"),
    (
        r"Tracker$",
        "of accelerate's trackers only tensorboard is carried",
        "use log_with='tensorboard' or 'jsonl', or a class of your own that inherits GeneralTracker",
    ),
    (
        r"command|launch|Launch|[Cc]onfig",
        "the command line is `paceline`'s own",
        "native: `paceline launch`, `paceline config`; accelerate's flags and files are understood",
    ),
)
_DEFAULT_WAY = (
    "no script that we know of needs it",
    "see `docs/migrating-from-accelerate.md`, or run this script with accelerate itself, without --compat",
)


def modules() -> dict[str, frozenset[str]]:
    """Names of accelerate's modules, each with its public names."""
    return listed(Path(__file__).with_name("names.txt"))


@cache
def carried() -> dict[str, str]:
    """Name of theirs -> "module:name" of ours."""
    found = {}
    for module, names in _CARRIED.items():
        for pair in names.split():
            theirs, _, ours = pair.partition("=")
            found[theirs] = f"{module}:{ours or theirs}"
    for module in ("accelerator", "checkpointing", "data_loader", "tracking", "utils.fsdp_utils", "utils.other"):
        found[f"accelerate.{module}.logger"] = f"{_HERE}.rank_logger:accelerate.{module}"
    available = {name for names in modules().values() for name in names if re.fullmatch(r"is_\w+_available", name)}
    return found | {name: f"{_HERE}.available:{name}" for name in available - found.keys()}


def native_way(name: str) -> tuple[str, str]:
    """Why a name is not carried, and what to do instead."""
    return next(((why, fix) for pattern, why, fix in _NATIVE_WAYS if re.search(pattern, name)), _DEFAULT_WAY)
