"""What accelerate's commands, config classes and plugins answer: run under the real library, and under the names that we serve.

Each function returns plain values. Of an error the type alone is compared: the sentences are each library's own.
"""

import argparse
import dataclasses
import functools
import importlib
import os
import tempfile
from enum import Enum

PARSERS = {
    "launch": "launch_command_parser",
    "env": "env_command_parser",
    "estimate": "estimate_command_parser",
    "merge": "merge_command_parser",
    "test": "test_command_parser",
    "to_fsdp2": "to_fsdp2_command_parser",
    "config": "get_config_parser",
}
LINES = [
    ["--num_processes", "2", "--cpu", "--fp8-margin", "3", "train.py", "--x", "1"],
    ["-m", "--multi_gpu", "--gpu-ids", "0,1", "-t", "3", "module"],
    ["--use_fsdp", "--fsdp_version", "2", "--fsdp_min_num_params", "5", "-q", "train.py", "a b"],
    ["--tpu_cluster", "--vm", "a", "--vm", "b", "--env", "A=1", "train.py"],
]
FILES = {
    "plain": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n",
    "0.11": "distributed_type: 'NO'\nfp16: true\n",
    "text": "distributed_type: 'NO'\nnum_processes: '4'\nmixed_precision: bf16\n",
    "dynamo": "distributed_type: 'NO'\ndynamo_backend: INDUCTOR\n",
    "dynamo off": "distributed_type: 'NO'\ndynamo_backend: 'NO'\n",
    "fsdp": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: 1\n  fsdp_version: '1'\n",
    "deepspeed": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\n",
    "unknown": "distributed_type: 'NO'\nfoo: 1\n",
    "no type": "num_processes: 2\n",
    "wrong type": "distributed_type: TPU\n",
    "several": "distributed_type: MULTI_CPU\nuse_cpu: true\nmpirun_config: {mpirun_hostfile: hosts}\nnum_machines: 2\n",
}
FSDP1 = [
    {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_offload_params": False},
    {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_version": 1, "fsdp_sync_module_states": True, "other": 1},
    {"fsdp_reshard_after_forward": "HYBRID_SHARD", "fsdp_forward_prefetch": False, "fsdp_use_orig_params": True},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
]
PLUGIN_CASES = [
    ({}, {}),
    ({"FSDP_VERSION": "2"}, {}),
    *(({"FSDP_SHARDING_STRATEGY": word}, {}) for word in ("2", "shard_grad_op", "HYBRID_SHARD", "9", "x")),
    *(({"FSDP_OFFLOAD_PARAMS": word}, {}) for word in ("true", "0")),
    *(({"FSDP_BACKWARD_PREFETCH": word}, {}) for word in ("BACKWARD_PRE", "1", "NO_PREFETCH", "backward_post")),
    *(({"FSDP_STATE_DICT_TYPE": word}, {}) for word in ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "2")),
    *(({"FSDP_AUTO_WRAP_POLICY": word}, {}) for word in ("TRANSFORMER_BASED_WRAP", "size_based_wrap", "NO_WRAP", "x")),
    ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}, {}),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2000"}, {}),
    ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B", "FSDP_MIN_NUM_PARAMS": "2000"}, {}),
    ({"FSDP_USE_ORIG_PARAMS": "true", "FSDP_FORWARD_PREFETCH": "true"}, {}),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_IGNORED_MODULES": "a.*"}, {}),
    ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"}, {}),
    ({"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_FORWARD_PREFETCH": "true"}, {}),
    ({}, {"sharding_strategy": "SHARD_GRAD_OP"}),
    ({}, {"reshard_after_forward": True}),
    ({}, {"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}),
    ({}, {"fsdp_version": 2, "cpu_offload": True, "mixed_precision_policy": "bf16"}),
    ({}, {"cpu_offload": True, "mixed_precision_policy": "fp16", "state_dict_type": "sharded_state_dict"}),
    ({}, {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["A"]}),
    ({}, {"mixed_precision_policy": {"param_dtype": "bf16"}}),
    ({}, {"activation_checkpointing_offload": True}),
]
AXES_CASES = [
    ({}, {}),
    ({}, {"dp_shard_size": 2, "tp_size": 2}),
    ({}, {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}),
    ({}, {"dp_replicate_size": 2, "tp_size": 2}),
    ({}, {"cp_size": 2, "sp_size": 2}),
    ({}, {"dp_shard_size": 0}),
    ({}, {"cp_size": 2, "cp_backend": "x"}),
    ({}, {"sp_size": 2}),
    (
        {
            "PARALLELISM_CONFIG_TP_SIZE": "4",
            "PARALLELISM_CONFIG_CP_SIZE": "2",
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
        },
        {},
    ),
]
DYNAMO_CASES = [
    ({}, {}),
    (
        {
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_MODE": "max-autotune",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "1",
        },
        {},
    ),
    ({"ACCELERATE_DYNAMO_USE_DYNAMIC": "true", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1"}, {}),
    ({}, {"backend": "eager", "dynamic": False}),
    ({}, {"backend": "inductor", "options": {"a": 1}}),
    ({}, {"backend": "x"}),
]


def plain(value):
    """A value as JSON has it."""
    if isinstance(value, functools.partial):
        return ["partial", value.func.__name__]
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set):
        return sorted(map(plain, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", None) or repr(value)


def answer(function, *args, env=None, **kwargs):
    """What a call returns, or the type of its error."""
    before = dict(os.environ)
    os.environ.update(env or {})
    try:
        return plain(function(*args, **kwargs))
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else type(error)  # a class of ours is the library's, too
        return f"error: {kind.__name__}"
    finally:
        os.environ.clear()
        os.environ.update(before)


def parsers():
    """Every option of every command."""
    found = {}
    for module, function in PARSERS.items():
        parser = getattr(importlib.import_module(f"accelerate.commands.{module}"), function)()
        rows = []
        for action in parser._actions:
            if action.dest not in ("help", "subcommand"):
                names = sorted(name.replace("-", "_") for name in action.option_strings)
                choices = sorted(action.choices) if action.choices else None
                default = plain(action.default)
                rows.append([sorted(set(names)), action.dest, plain(action.nargs), default, choices, action.required])
        found[module] = sorted(rows, key=str)
    return found


def command_lines():
    """What command lines of `accelerate launch` are read as."""
    from accelerate.commands.launch import launch_command_parser

    return [plain(vars(launch_command_parser().parse_args(words))) for words in LINES]


def config_files():
    """Config files as they are read, and as they are written again."""
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.config.update import update_config

    found = {}
    for name, text in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "config.yaml")
            with open(path, "w") as file:
                file.write(text)
            read = answer(lambda path: load_config_from_file(path).to_dict(), path)
            answer(update_config, argparse.Namespace(config_file=path))
            with open(path) as file:
                found[name] = [read, file.read()]
    return found


def basic_config():
    """The file that `write_basic_config` writes."""
    from accelerate.utils import write_basic_config

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        write_basic_config("bf16", path)
        with open(path) as file:
            return file.read()


def to_fsdp2():
    """Blocks for version 1 in the words of version 2."""
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING, ARGUMENT_VALUE_MAPPING, convert_config_to_fsdp2

    converted = [convert_config_to_fsdp2({"fsdp_config": dict(block)}) for block in FSDP1]
    return [converted, plain(ARGUMENT_KEY_MAPPING), plain(ARGUMENT_VALUE_MAPPING)]


def plugins():
    """Fields of the plugins under several environments."""
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, TorchDynamoPlugin

    def shown(kind, names=()):
        def make(**kwargs):
            made = kind(**kwargs)
            fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
            return fields | {name: getattr(made, name) for name in names}

        return make

    axes = "dp_dim_names non_dp_dim_names dp_shard_cp_dim_names dp_cp_dim_names fsdp_dim_names total_size "
    axes += "non_data_parallel_size data_parallel_size dp_replicate_enabled dp_shard_enabled tp_enabled cp_enabled "
    axes += "sp_enabled active_mesh_dims"
    mesh = [
        answer(lambda **kwargs: ParallelismConfig(**kwargs)._get_mesh(), env=env, **kwargs)
        for env, kwargs in AXES_CASES
    ]
    dynamo = [
        answer(
            lambda **kwargs: [TorchDynamoPlugin(**kwargs).to_dict(), TorchDynamoPlugin(**kwargs).to_kwargs()],
            env=env,
            **kwargs,
        )
        for env, kwargs in DYNAMO_CASES
    ]
    return {
        "fsdp": [answer(shown(FullyShardedDataParallelPlugin), env=env, **kwargs) for env, kwargs in PLUGIN_CASES],
        "axes": [answer(shown(ParallelismConfig, axes.split()), env=env, **kwargs) for env, kwargs in AXES_CASES],
        "mesh": mesh,
        "dynamo": [answer(shown(TorchDynamoPlugin), env=env, **kwargs) for env, kwargs in DYNAMO_CASES],
        "dynamo as arguments": dynamo,
    }


def setters():
    """What the setters of the FSDP plugin leave behind."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin

    found = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        for word, override in (("bf16", False), ("fp16", False), (torch.float16, True)):
            plugin.set_mixed_precision(word, override=override)
            found.append(plain(plugin.mixed_precision_policy))
        for word in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            plugin.set_state_dict_type(word)
            found.append(plain([plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config]))
    for options in (
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Nothing"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10},
        {"auto_wrap_policy": "size_based_wrap"},
    ):
        plugin = FullyShardedDataParallelPlugin(**options)
        found.append([answer(plugin.set_auto_wrap_policy, model), plain(plugin.auto_wrap_policy)])
    return found


def handlers():
    """What keyword bundles hand on, and the members of the enumerations."""
    import accelerate.utils.dataclasses as classes

    made = [
        classes.DistributedDataParallelKwargs(comm_hook=classes.DDPCommunicationHookType.FP16, bucket_cap_mb=1),
        classes.InitProcessGroupKwargs(),
        classes.InitProcessGroupKwargs(backend="gloo"),
        classes.ProfileKwargs(with_flops=True),
        classes.GradientAccumulationPlugin(num_steps=2),
        classes.AutocastKwargs(enabled=False),
        classes.GradScalerKwargs(init_scale=2.0),
        classes.MSAMPRecipeKwargs(opt_level="O1"),
    ]
    kinds = "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType LoggerType "
    kinds += "PrecisionType RNGType SageMakerDistributedType"
    members = {
        name: [[str(member), member.name, member.value] for member in getattr(classes, name)] for name in kinds.split()
    }
    return [[[plain(each.to_dict()), plain(each.to_kwargs())] for each in made], members]


def estimates():
    """Memory of a training step, and the table."""
    from accelerate.commands.estimate import create_ascii_table, estimate_training_usage

    usage = [estimate_training_usage(1000, word) for word in ("float32", "float16", "bfloat16", "int8", "int4")]
    table = create_ascii_table(["a", "bb", "c"], [["x", "1", "y"], ["long text", "2.5", "z"]], "A title")
    return [usage, table]


def everything():
    """All of the above."""
    functions = (
        parsers,
        command_lines,
        config_files,
        basic_config,
        to_fsdp2,
        plugins,
        setters,
        handlers,
        estimates,
    )
    return {function.__name__: function() for function in functions}
