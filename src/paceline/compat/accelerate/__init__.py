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
# Commands of an installed door -> what runs them.
COMMANDS = {
    "accelerate": "paceline.compat.accelerate.commands.accelerate_cli:main",
    "accelerate-config": "paceline.compat.accelerate.commands.config:main",
    "accelerate-estimate-memory": "paceline.compat.accelerate.commands.estimate:main",
    "accelerate-launch": "paceline.compat.accelerate.commands.launch:main",
    "accelerate-merge-weights": "paceline.compat.accelerate.commands.merge:main",
}

_HERE = "paceline.compat.accelerate"
_COMMANDS = f"{_HERE}.commands"
# Module -> names; `theirs=ours` where ours is called otherwise. A name with its module means this in that module alone.
_CARRIED = {
    f"{_HERE}.accelerator": "Accelerator",
    f"{_HERE}.arguments": """AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs
        GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration""",
    f"{_HERE}.plugins": "DeepSpeedPlugin TorchDynamoPlugin TorchTensorParallelPlugin",
    f"{_HERE}.fsdp_plugin": "FullyShardedDataParallelPlugin",
    f"{_HERE}.parallelism_config": """DeepSpeedSequenceParallelConfig ParallelismConfig TorchContextParallelConfig
        TorchTensorParallelConfig""",
    f"{_HERE}.recipes": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    f"{_HERE}.module_classes": "add_model_config_to_megatron_parser get_module_class_from_name",
    f"{_HERE}.sharded": """disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading fsdp2_canonicalize_names
        load_fsdp_model load_fsdp_optimizer merge_fsdp_weights model_has_dtensor save_fsdp_model save_fsdp_optimizer""",
    f"{_HERE}.kinds": """BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType
        DynamoBackend EnumWithContains FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType""",
    f"{_HERE}.state": "AcceleratorState GradientState PartialState is_initialized",
    f"{_HERE}.preparation": "AcceleratedScheduler",
    f"{_HERE}.loaders": "DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin prepare_data_loader skip_first_batches",
    f"{_HERE}.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers",
    "paceline.launch.notebook": "debug_launcher notebook_launcher",
    f"{_HERE}.operations": """broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32
        find_batch_size find_device gather gather_object honor_type ignorant_find_batch_size is_namedtuple
        is_torch_tensor listify pad_across_processes recursively_apply reduce send_to_device slice_tensors
        synchronize_rng_state synchronize_rng_states wait_for_everyone""",
    f"{_HERE}.modeling": """clean_device_map compute_module_sizes convert_bytes convert_file_size_to_int
        dtype_byte_size extract_model_from_parallel find_tied_parameters get_max_layer_size get_max_memory
        has_compiled_regions id_tensor_storage init_empty_weights init_on_device is_compiled_module
        load_checkpoint_in_model load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device""",
    f"{_HERE}.surroundings": """are_libraries_initialized clear_device_cache clear_environment compare_versions
        find_executable_batch_size get_gpu_info get_int_from_env get_pretty_name is_peft_model
        is_port_in_use is_torch_version is_tqdm_available load merge_dicts parse_choice_from_env parse_flag_from_env
        patch_environment purge_accelerate_environment recursive_getattr release_memory save
        should_reduce_batch_size str_to_bool tqdm""",
    f"{_HERE}.constants": """FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE
        MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME
        SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME""",
    f"{_COMMANDS}.accelerate_cli": "accelerate.commands.accelerate_cli.main=main",
    f"{_COMMANDS}.arguments": "CustomArgumentGroup CustomArgumentParser",
    f"{_COMMANDS}.config.config": """accelerate.commands.config.config.description=description
        accelerate.commands.config.config.main=main accelerate.commands.config.main=main config_command
        config_command_parser get_cluster_input get_config_parser get_user_input""",
    f"{_COMMANDS}.config.config_args": """BaseConfig ClusterConfig SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
        SAGEMAKER_TRANSFORMERS_VERSION SageMakerConfig cache_dir default_config_file default_json_config_file
        default_yaml_config_file hf_cache_home load_config_from_file""",
    f"{_COMMANDS}.config.default": """accelerate.commands.config.default.description=description default_command_parser
        default_config_command write_basic_config""",
    f"{_COMMANDS}.config.update": """accelerate.commands.config.update.description=description update_command_parser
        update_config update_config_command""",
    f"{_COMMANDS}.env": """accelerate.commands.env.main=main accelerate.commands.env.version=version env_command
        env_command_parser""",
    f"{_COMMANDS}.estimate": """accelerate.commands.estimate.main=main create_ascii_table create_empty_model
        estimate_command estimate_command_parser estimate_training_usage gather_data""",
    f"{_COMMANDS}.launch": """accelerate.commands.launch.main=main deepspeed_launcher launch_command
        launch_command_parser multi_gpu_launcher simple_launcher""",
    f"{_COMMANDS}.merge": """accelerate.commands.merge.description=description accelerate.commands.merge.main=main
        merge_command merge_command_parser""",
    f"{_COMMANDS}.test": "accelerate.commands.test.main=main test_command test_command_parser",
    f"{_COMMANDS}.to_fsdp2": """ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus convert_config_to_fsdp2
        load_config to_fsdp2_command to_fsdp2_command_parser""",
    f"{_COMMANDS}.tpu": "accelerate.commands.tpu.main=main tpu_command_launcher tpu_command_parser",
    f"{_HERE}.launch_environment": """PrepareForLaunch convert_dict_to_env_variables env_var_path_add
        prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config prepare_multi_gpu_env
        prepare_simple_launcher_cmd_env setup_fp8_env""",
    "paceline.data.seed": "set_seed",
    "paceline.observe.logs": "MultiProcessAdapter=RankLogger get_logger",
    "paceline.optim.local_sgd": "LocalSGD",
    "paceline.optim.optimizer": "AcceleratedOptimizer=PreparedOptimizer",
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
    available = {name for names in modules().values() for name in names if re.fullmatch(r"is_\w+_available", name)}
    return found | {name: f"{_HERE}.available:{name}" for name in available - found.keys()}


def native_way(name: str) -> tuple[str, str]:
    """Why a name is not carried, and what to do instead."""
    return next(((why, fix) for pattern, why, fix in _NATIVE_WAYS if re.search(pattern, name)), _DEFAULT_WAY)
