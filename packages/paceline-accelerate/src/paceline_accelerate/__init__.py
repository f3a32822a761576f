"""The names of Hugging Face accelerate, and what of ours stands for each.

    names.txt       every public name of accelerate 1.15, by module: what exists, and so may be imported
    imports.txt     the modules of others that they import, by module: `patch("accelerate.state.os.environ")`
    _CARRIED        those that do something here, by the module of ours that has them
    the rest        raise `CompatError` when they are used; `native_way` says what to do instead

A name means the same wherever the library offers it, so one table serves all of its modules.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from paceline_doors.names import first_way, listed, targets

VERSION = "1.15.0"
ABOUT: dict[str, object] = {}
# Commands of an installed door -> what runs them.
COMMANDS = {
    "accelerate": "paceline_accelerate.commands.accelerate_cli:main",
    "accelerate-config": "paceline_accelerate.commands.config.config:main",
    "accelerate-estimate-memory": "paceline_accelerate.commands.estimate:main",
    "accelerate-launch": "paceline_accelerate.commands.launch:main",
    "accelerate-merge-weights": "paceline_accelerate.commands.merge:main",
}

_HERE = "paceline_accelerate"
_COMMANDS = f"{_HERE}.commands"
# Module -> names; `theirs=ours` where ours is called otherwise. A name with its module means this in that module alone.
_CARRIED = {
    f"{_HERE}.accelerator": "Accelerator",
    f"{_HERE}.arguments": """AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs
        GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration""",
    f"{_HERE}.deepspeed_config": "HfDeepSpeedConfig",
    f"{_HERE}.deepspeed_plugin": "DeepSpeedPlugin get_active_deepspeed_plugin",
    f"{_HERE}.deepspeed_wrappers": """DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim
        DummyScheduler deepspeed_required map_pytorch_optim_to_deepspeed""",
    f"{_HERE}.plugins": "TorchDynamoPlugin TorchTensorParallelPlugin",
    f"{_HERE}.fsdp_plugin": "FullyShardedDataParallelPlugin",
    f"{_HERE}.parallelism_config": """DeepSpeedSequenceParallelConfig ParallelismConfig TorchContextParallelConfig
        TorchTensorParallelConfig""",
    f"{_HERE}.recipes": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    f"{_HERE}.module_classes": "add_model_config_to_megatron_parser get_module_class_from_name",
    f"{_HERE}.fsdp_modules": """_get_model_state_dict _refuse_recurrent_layers_under_sequence_parallelism
        _set_model_state_dict ensure_weights_retied filter_first_and_last_linear_layers filter_linear_layers
        find_first_last_linear_layers fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict
        fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
        get_parameters_from_modules""",
    f"{_HERE}.sharded": "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer",
    f"{_HERE}.divided_models": "model_has_dtensor=is_divided",
    f"{_HERE}.kinds": """BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType
        DynamoBackend EnumWithContains FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType""",
    # Every rank builds the model, and a model on the meta device takes no memory until it is prepared.
    f"{_HERE}.state": """AcceleratorState PartialState ThreadLocalSharedDict do_nothing is_initialized
        disable_fsdp_ram_efficient_loading=do_nothing enable_fsdp_ram_efficient_loading=do_nothing""",
    f"{_HERE}.data_loader": "prepare_data_loader skip_first_batches",
    f"{_HERE}.loader_classes": """DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin
        SkipDataLoader""",
    f"{_HERE}.samplers": """BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler
        get_sampler""",
    f"{_HERE}.tracking": """AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker
        LOGGER_TYPE_TO_CLASS MLflowTracker SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker
        filter_trackers get_available_trackers on_main_process register_tracker_class""",
    "paceline.launch.notebook": "debug_launcher notebook_launcher",
    f"{_HERE}.available": "_is_package_available",
    f"{_HERE}.launchers": "test_launch",
    f"{_HERE}.operations": """CannotPadNestedTensorWarning GatheredParameters broadcast broadcast_object_list
        chained_operation copy_tensor_to_devices gather gather_object gather_tensor_shape pad_across_processes
        reduce verify_operation wait_for_everyone""",
    f"{_HERE}.autocast": "get_grad_scaler get_mixed_precision_context_manager",
    f"{_HERE}.module_tensors": """_get_proper_dtype=dtype_of check_device_same find_tied_parameters get_non_persistent_buffers
        id_tensor_storage named_module_tensors recursive_getattr retie_parameters set_module_tensor_to_device""",
    f"{_HERE}.module_sizes": """calculate_maximum_sizes compute_module_sizes compute_module_total_buffer_size
        convert_bytes convert_file_size_to_int dtype_byte_size get_balanced_memory get_max_layer_size
        get_max_memory get_module_leaves get_module_size_with_ties""",
    f"{_HERE}.device_map": """check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device
        clean_device_map fallback_allocate infer_auto_device_map""",
    f"{_HERE}.hooks": """_accelerate_added_attributes AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook
        UserCpuOffloadHook add_hook_to_module has_offloaded_params remove_hook_from_module
        remove_hook_from_submodules""",
    f"{_HERE}.hook_attachment": """attach_align_device_hook attach_align_device_hook_on_blocks
        attach_execution_device_hook attach_layerwise_casting_hooks""",
    f"{_HERE}.offload": """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict
        load_offloaded_weight load_offloaded_weights offload_state_dict offload_weight save_offload_index""",
    f"{_HERE}.inference": "find_pippy_batch_size prepare_pippy",
    f"{_HERE}.offloaded_state": "align_module_device get_state_dict_from_offload get_state_dict_offloaded_model",
    f"{_HERE}.loading": "load_checkpoint_in_model load_state_dict",
    f"{_HERE}.big_modeling": """cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights
        init_on_device load_checkpoint_and_dispatch""",
    f"{_HERE}.surroundings": """STR_OPERATION_TO_FUNC are_libraries_initialized clear_environment compare_versions
        get_pretty_name is_peft_model is_port_in_use is_torch_version load
        merge_dicts parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment save
        str_to_bool tqdm""",
    f"{_HERE}.constants": """BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION
        BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_MODEL_NAME
        FSDP_PYTORCH_VERSION MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME
        PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
        SAFE_WEIGHTS_PATTERN_NAME SAGEMAKER_PARALLEL_EC2_INSTANCES SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS
        TORCH_SAFE_GLOBALS TYPE_CHECKING WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
    f"{_HERE}.word_lists": """DEEPSPEED_MULTINODE_LAUNCHERS DYNAMO_BACKENDS FSDP2_STATE_DICT_TYPE
        FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE TORCH_DYNAMO_MODES""",
    f"{_HERE}.gradient_state": "GradientState",
    f"{_HERE}.scheduler": "AcceleratedScheduler",
    f"{_HERE}.optimizer": "AcceleratedOptimizer move_to_device patch_optimizer_step",
    f"{_HERE}.errors": "DistributedOperationException",
    f"{_HERE}.nested": """ConvertOutputsToFp32 TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TensorInformation concatenate
        convert_outputs_to_fp32 convert_to_fp32 find_batch_size find_device get_data_structure get_shape honor_type
        ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information is_torch_tensor
        is_torch_xpu_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors""",
    f"{_COMMANDS}.accelerate_cli": "accelerate.commands.accelerate_cli.main=main",
    f"{_COMMANDS}.arguments": """CustomArgumentGroup CustomArgumentParser CustomHelpFormatter
        SubcommandHelpFormatter clean_option options_to_group""",
    f"{_COMMANDS}.config.config": """accelerate.commands.config.config.description=description
        accelerate.commands.config.config.main=main accelerate.commands.config.main=main config_command
        config_command_parser get_cluster_input get_config_parser get_user_input""",
    f"{_COMMANDS}.config.config_args": """BaseConfig ClusterConfig SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
        SAGEMAKER_TRANSFORMERS_VERSION SageMakerConfig cache_dir default_config_file default_json_config_file
        default_yaml_config_file hf_cache_home load_config_from_file""",
    f"{_COMMANDS}.config.default": """accelerate.commands.config.default.description=description default_command_parser
        default_config_command write_basic_config""",
    f"{_COMMANDS}.config.menu": "BulletMenu",
    f"{_COMMANDS}.config.update": """accelerate.commands.config.update.description=description update_command_parser
        update_config update_config_command""",
    f"{_COMMANDS}.env": """accelerate.commands.env.main=main accelerate.commands.env.version=version env_command
        env_command_parser""",
    f"{_COMMANDS}.estimate": """accelerate.commands.estimate.main=main add_timm_hub_prefix check_has_model
        create_ascii_table create_empty_model
        estimate_command estimate_command_parser estimate_training_usage gather_data""",
    f"{_COMMANDS}.launch": """accelerate.commands.launch.main=main deepspeed_launcher launch_command
        launch_command_parser multi_gpu_launcher simple_launcher""",
    f"{_COMMANDS}.merge": """accelerate.commands.merge.description=description accelerate.commands.merge.main=main
        merge_command merge_command_parser""",
    f"{_COMMANDS}.test": "accelerate.commands.test.main=main test_command test_command_parser",
    f"{_COMMANDS}.to_fsdp2": """ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus convert_config_to_fsdp2
        load_config to_fsdp2_command to_fsdp2_command_parser""",
    f"{_COMMANDS}.tpu": "accelerate.commands.tpu.main=main tpu_command_launcher tpu_command_parser",
    "paceline.data.seed": "set_seed",
    f"{_HERE}.rank_logger": "MultiProcessAdapter get_logger",
    f"{_HERE}.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    f"{_HERE}.random_streams": "synchronize_rng_state synchronize_rng_states",
    f"{_HERE}.wrapping": """clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 extract_model_from_parallel get_model_tp_size get_module_children_bottom_up
        has_compiled_regions has_repeated_blocks is_compiled_module is_repeated_blocks""",
    f"{_HERE}.host": """CPUInformation USE_TORCH_XLA check_cuda_fp8_capability check_cuda_p2p_ib_support
        check_os_kernel get_cpu_distributed_information
        get_current_device_type get_driver_version get_free_port get_gpu_info get_int_from_env install_xla
        is_habana_gaudi1 override_numa_affinity set_numa_affinity torchao_required""",
    f"{_HERE}.quantised": """BnbQuantizationConfig get_keys_to_not_convert has_4bit_bnb_layers load_and_quantize_model
        replace_with_bnb_layers""",
    f"{_HERE}.checkpoint_functions": """load_accelerator_state load_custom_state save_accelerator_state
        save_custom_state""",
    f"{_HERE}.local_sgd": "LocalSGD",
    f"{_HERE}.test_utils.testing": """AccelerateTestCase DEFAULT_LAUNCH_COMMAND MockingTestCase SubprocessCallException
        TempDirTestCase are_the_same_tensors assert_exception capture_call_output device_count execute_subprocess_async
        get_backend get_launch_command get_torch_dist_unique_port memory_allocated_func
        accelerate.test_utils.testing.parse_flag_from_env=parse_flag_from_env path_in_accelerate_package
        pytest_xdist_worker_id require_torch_min_version run_command run_first skip slow torch_device""",
    f"{_HERE}.test_utils.training": "RegressionDataset RegressionModel",
    "accelerate.test_utils.scripts": "test_ops test_script test_sync",
    **{
        f"{_HERE}.test_utils.scripts.{script}": f"accelerate.test_utils.scripts.{script}.main=main"
        for script in ("test_cli", "test_ops", "test_script", "test_sync")
    },
}

# The modules that accelerate imports with a package, so that `from accelerate import *` gives them too. It leaves out others:
# the names `deepspeed` and `rich` would hide other libraries.
IMPORTED_WITH = {
    "accelerate": """accelerator big_modeling checkpointing commands data_loader hooks inference launchers logging optimizer
        parallelism_config scheduler state tracking utils""",
    "accelerate.utils": """ao bnb constants dataclasses environment fsdp_utils imports launch megatron_lm memory modeling
        offload operations other random torch_xla transformer_engine versions""",
}

# First match counts: pattern of a name with its module, why it is not carried, what to do.
_NATIVE_WAYS = (
    (
        r"tpu|TPU|xla",
        "Paceline runs on the CPU and on accelerators that `torch.accelerator` knows, and a TPU is none of them",
        "run on such a device: `paceline launch train.py`",
    ),
    (
        r"[Ss]age[Mm]a",
        "Paceline starts no jobs on SageMaker",
        "start `paceline launch train.py` on the machine itself",
    ),
    (
        r"\.prepare_\w+_(cmd_)?env|PrepareForLaunch|_env_parallelism_config|setup_fp8_env|env_var_path_add"
        r"|convert_dict_to_env|_filter_args|_validate_launch_command|_convert_nargs_to_dict",
        "`accelerate launch` runs `paceline launch` here, which makes commands and variables by itself",
        "call `accelerate.commands.launch.launch_command(args)`, or start `paceline launch train.py`",
    ),
    (
        r"\.bnb\.",
        "a quantised model is on one device: parts of it on the host or on disk would have to be quantised in each pass",
        "quantise it on one device: `load_and_quantize_model(model, config, weights_location=...)`",
    ),
    (
        r"megatron|Megatron|MEGATRON|TrainStep|avg_losses|\.parse_\w+_config$",
        "Megatron-LM's engine is not carried: tensor and pipeline parallel are axes of a plan",
        "native: `paceline.Accelerator(plan={'tp': 2, 'pp': 2})`",
    ),
    (
        r"\.ao\.|transformer_engine|fp8|FP8|_ao(\b|_)|AORecipe|linear_layers|convert_model|MSAMP|msamp",
        "the plan chooses the layers that multiply in float8, by torchao alone",
        "use `Accelerator(mixed_precision='fp8')`, with `AORecipeKwargs` for a recipe or a choice of layers",
    ),
    (
        r"\.inference\.|pippy",
        "`prepare_pippy` divides and runs the model here without it",
        "call `prepare_pippy(model, example_args=...)`, or natively `paceline.Accelerator(plan={'pp': 2})`",
    ),
    (
        r"verify_on_hub",
        "nothing here reaches over the network",
        "native: `huggingface_hub.model_info(name)`",
    ),
    (
        r"test_utils\.(examples|training)\.",
        "it reads files of accelerate's own repository, which are not here",
        "take `RegressionDataset` and `RegressionModel` of `accelerate.test_utils`, or data of your own",
    ),
)
_DEFAULT_WAY = (
    "no script that we know of needs it",
    "see `docs/migrating-from-accelerate.md`, or run this script with accelerate itself, without --compat",
)


def after_install(*, newly: bool, found_before: bool) -> None:
    """Changes libraries that are used beside accelerate, and exports what a launcher was told."""
    from paceline_accelerate import launcher_variables, neighbours

    if newly:
        neighbours.install(found_before=found_before)
    # Also where a warm process has served it already, before it knew what the launcher was told.
    launcher_variables.export_settings()
    launcher_variables.serve_deepspeed()


def notices() -> list[str]:
    """Says which installed libraries are older than those that were tried."""
    from paceline_accelerate.neighbours import too_old

    return too_old()


def modules() -> dict[str, frozenset[str]]:
    """Names of accelerate's modules, each with its public names."""
    return listed(Path(__file__).with_name("names.txt"))


@cache
def imports() -> dict[str, dict[str, str]]:
    """Maps each module of accelerate to the modules of others that it imports: the name in it -> the module's full name."""
    imports_of = {}
    for module, words in listed(Path(__file__).with_name("imports.txt")).items():
        # A word is `os`, or `np=numpy`.
        pairs = [word.partition("=") for word in words]
        imports_of[module] = {name: full_name or name for name, _, full_name in pairs}
    return imports_of


@cache
def carried() -> dict[str, str]:
    """Maps each name of theirs to "module:name" of ours."""
    sources = targets(_CARRIED)
    for module in ("accelerator", "checkpointing", "data_loader", "tracking", "utils.fsdp_utils", "utils.other"):
        sources[f"accelerate.{module}.logger"] = f"{_HERE}.rank_logger:accelerate.{module}"
    # `is_wandb_available`, `require_wandb` and their like are all answered by one module each.
    for names_of_module in modules().values():
        for name in names_of_module:
            if re.fullmatch(r"is_\w+_available", name):
                sources.setdefault(name, f"{_HERE}.available:{name}")
            if name.startswith("require_"):
                sources.setdefault(name, f"{_HERE}.test_utils.testing:{name}")
    return sources


def native_way(name: str) -> tuple[str, str]:
    """Returns why a name, given with its module, is not carried, and what to do instead."""
    return first_way(name, _NATIVE_WAYS, _DEFAULT_WAY)
