"""The questions of `accelerate config`, as a table. Nothing here asks anything: `ask` does, and `config` writes the file.

A row says which key of the file an answer stands for, which answers there are, and when the question is asked. The order,
the answers and the defaults are those of accelerate 1.15, so that a script which answers its questions answers these. To add
a question, add a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import Problem
from paceline.base.parts import how_to_install
from paceline.config.given import Given
from paceline_accelerate import word_lists
from paceline_accelerate.available import is_fp8_available
from paceline_accelerate.commands.config.config_args import ClusterConfig
from paceline_accelerate.dialect import DIALECT

# The answers so far, by the name of their question.
Answers = Mapping[str, Any]
# The answers of a menu: what is shown -> the value for the file.
Choices = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """An answer that is typed.

    Attributes:
        read: turns the text into the value; an exception means that the question is asked again.
        expected: what can be typed, in words.
    """

    read: Callable[[str], Any]
    expected: str


YES_NO = Line(lambda text: {"yes": True, "no": False}[text.lower()], "yes or no")
WHOLE = Line(int, "a whole number")
NUMBER = Line(float, "a number")
TEXT = Line(str, "any text")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: the key in the file, after the name of its block: "fsdp_config.fsdp_version". An answer that is no value of
            the file has a name that begins with "_".
        text: the question, without its choices and its default.
        answer: what is typed, or the choices of a menu, which may depend on the answers so far.
        default: the value of an empty line, or the value that a menu marks first. With None an empty line is read like any
            other, and a menu marks its first choice.
        when: the question is asked if all of these hold for the answers so far.
        problem: says of the answers, this one included, why they cannot be used; None if they can.
    """

    name: str
    text: str
    answer: Line | Choices | Callable[[Answers], Choices]
    default: Any = None
    when: tuple[Callable[[Answers], bool], ...] = ()
    problem: Callable[[Answers], Problem | None] = lambda answers: None


# -- conditions and choices ----------------------------------------------------------------------------------


def distributed_type(answers: Answers) -> str:
    """Returns the value of `distributed_type`: the engine if one was chosen, else the type of the machine."""
    if answers.get("_deepspeed"):
        return "DEEPSPEED"
    if answers.get("_fsdp"):
        return "FSDP"
    return str(answers["_machine"])


def uses_cpu(answers: Answers) -> bool:
    """Returns the value of `use_cpu`."""
    return answers["_machine"] == "MULTI_CPU" or bool(answers.get("use_cpu"))


def _is(name: str, *values: object) -> Callable[[Answers], bool]:
    """Returns the condition that a question was answered with one of these values."""
    return lambda answers: answers.get(name) in values


def _type_is(*types: str) -> Callable[[Answers], bool]:
    return lambda answers: distributed_type(answers) in types


def _above_one(name: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers.get(name, 1) > 1)


def _is_parallel(answers: Answers) -> bool:
    return bool(answers["_machine"] != "NO")


def _is_on_device(answers: Answers) -> bool:
    # `_mps` is known beforehand: Apple's chips have one device, and none of the engines.
    return not uses_cpu(answers) and not answers["_mps"]


def _may_use_deepspeed(answers: Answers) -> bool:
    is_mps = answers["_mps"] and not uses_cpu(answers)
    return answers["_machine"] != "MULTI_CPU" and not is_mps


def _is_divided(answers: Answers) -> bool:
    return distributed_type(answers) != "NO"


def _has_no_config_file(answers: Answers) -> bool:
    # A DeepSpeed JSON file says the precision itself.
    return not answers.get("_deepspeed_file")


def _words(words: Iterable[object]) -> Choices:
    """Returns the choices that are shown as they stand in the file."""
    return {str(word): word for word in words}


def _ranks(answers: Answers) -> Choices:
    return _words(range(answers["num_machines"]))


_MACHINES = {
    "one process, not distributed": "NO",
    "multi-CPU": "MULTI_CPU",
    "multi-XPU": "MULTI_XPU",
    "multi-HPU": "MULTI_HPU",
    "multi-GPU": "MULTI_GPU",
    "multi-NPU": "MULTI_NPU",
    "multi-MLU": "MULTI_MLU",
    "multi-SDAA": "MULTI_SDAA",
    "multi-MUSA": "MULTI_MUSA",
    "multi-NEURON": "MULTI_NEURON",
    "TPU": "XLA",
}
_ACCELERATORS = tuple(kind for kind in _MACHINES.values() if kind.startswith("MULTI_") and kind != "MULTI_CPU")
# accelerate's menu has a misprint in one name, and ends with an error where that one is chosen.
_BACKEND_NAMES = [name.replace("TORHCHXLA", "TORCHXLA") for name in word_lists.DYNAMO_BACKENDS]
_BACKENDS = {name.lower(): name for name in _BACKEND_NAMES}
_DEVICES = _words(["none", "cpu", "nvme"])


# -- what cannot be had --------------------------------------------------------------------------------------


def _refused(name: str, value: object, flag: str, flag_value: object = "true") -> Callable[[Answers], Problem | None]:
    """Refuses an answer for the reason for which `launch` refuses a flag."""

    def problem(answers: Answers) -> Problem | None:
        judged = DIALECT.judge(Given(flag, flag_value, "command line", "your answer"))
        return judged if answers[name] == value and isinstance(judged, Problem) else None

    return problem


def _without_engine(engine: str) -> Callable[[Answers], Problem | None]:
    """Refuses an engine for Neuron's devices, as accelerate does."""

    def problem(answers: Answers) -> Problem | None:
        if answers[engine] and answers["_machine"] == "MULTI_NEURON":
            return Problem(
                "accelerate-feature",
                f"{distributed_type(answers)} is not supported on Neuron devices.",
                "it comes from your answers",
                "answer this question with no",
            )
        return None

    return problem


def _without_fp8(answers: Answers) -> Problem | None:
    if answers["mixed_precision"] != "fp8" or is_fp8_available():
        return None
    return Problem(
        "accelerate-feature",
        "mixed_precision fp8 needs torchao, which is not installed.",
        "it comes from your answer",
        f"run `{how_to_install('fp8')}`, or choose bf16",
    )


def _alone(answers: Answers) -> Problem | None:
    if distributed_type(answers) != "MULTI_GPU" or answers["num_machines"] != 1 or answers["num_processes"] != 1:
        return None
    return Problem(
        "config-value",
        "num_processes cannot be 1 for several GPUs.",
        "your answers: multi-GPU, one machine, one GPU",
        "give two or more GPUs, or choose one process as the type of machine",
    )


# -- the questions -------------------------------------------------------------------------------------------


def _row(
    name: str,
    text: str,
    answer: Line | Choices | Callable[[Answers], Choices],
    default: Any = None,
    *when: Callable[[Answers], bool],
    problem: Callable[[Answers], Problem | None] = lambda answers: None,
) -> Question:
    """Returns a question; the arguments are the attributes of `Question`, with the conditions one after the other."""
    return Question(name, text, answer, default, when, problem)


ENVIRONMENT = _row(
    "compute_environment",
    "Where do you train?",
    {"on this machine": "LOCAL_MACHINE", "Amazon SageMaker": "AMAZON_SAGEMAKER"},
    problem=_refused("compute_environment", "AMAZON_SAGEMAKER", "compute_environment", "AMAZON_SAGEMAKER"),
)

_SEVERAL = _above_one("num_machines")
_MACHINE = (
    _row("_machine", "What do the processes run on?", _MACHINES, problem=_refused("_machine", "XLA", "tpu")),
    _row("num_machines", "Number of machines", WHOLE, 1, _is_parallel),
    _row("machine_rank", "Which of them is this one?", _ranks, None, _SEVERAL),
    _row("main_process_ip", "Address of machine 0", TEXT, None, _SEVERAL),
    _row("main_process_port", "Port on machine 0 where the others connect", WHOLE, None, _SEVERAL),
    _row("same_network", "Do the machines share one local network?", YES_NO, True, _SEVERAL),
    _row("rdzv_backend", "Rendezvous backend (static, c10d)", TEXT, "static", _is("same_network", False)),
    _row("debug", "Check the shapes before each collective operation? It is slower.", YES_NO, False, _is_parallel),
    _row("use_cpu", "Train on the CPU, even where there is an accelerator?", YES_NO, False, _is("_machine", "NO")),
    _row("_mpirun", "Start the processes with mpirun?", YES_NO, False, _is("_machine", "MULTI_CPU")),
    _row("mpirun_config.mpirun_hostfile", "Host file for mpirun", TEXT, "~/hostfile", _is("_mpirun", True)),
)

_C = "dynamo_config.dynamo_"
_COMPILED = _is("_dynamo", True)
_TUNED = _is("_dynamo_options", True)
_DYNAMO = (
    _row("_dynamo", "Compile the model with torch.compile (dynamo)?", YES_NO, False),
    _row(f"{_C}backend", "Backend of torch.compile", _BACKENDS, "INDUCTOR", _COMPILED),
    _row("_dynamo_options", "Set more options of torch.compile?", YES_NO, False, _COMPILED),
    _row(f"{_C}mode", "Mode of torch.compile", _words(word_lists.TORCH_DYNAMO_MODES), None, _TUNED),
    _row(f"{_C}use_fullgraph", "Must the model compile into one graph?", YES_NO, False, _TUNED),
    _row(f"{_C}use_dynamic", "Trace with dynamic shapes?", YES_NO, False, _TUNED),
    _row(f"{_C}use_regional_compilation", "Compile repeated blocks one by one?", YES_NO, False, _TUNED),
)

_D = "deepspeed_config."
_LAUNCHERS = word_lists.DEEPSPEED_MULTINODE_LAUNCHERS
_USED = _is("_deepspeed", True)
_FIELDS = _is("_deepspeed_file", False)
_DIVIDED = _is(f"{_D}zero_stage", 2, 3)
_NVME_PARAM = _is(f"{_D}offload_param_device", "nvme")
_NVME_OPTIMIZER = _is(f"{_D}offload_optimizer_device", "nvme")
# DeepSpeed's launcher "standard" takes no host file.
_HOSTS = _is(f"{_D}deepspeed_multinode_launcher", *(launcher for launcher in _LAUNCHERS if launcher != "standard"))
_EXCLUDED = _is("_exclusion", True)
_INCLUDED = _is("_inclusion", True)
_DEEPSPEED = (
    _row("_deepspeed", "Use DeepSpeed?", YES_NO, False, _may_use_deepspeed, problem=_without_engine("_deepspeed")),
    _row("_deepspeed_file", "Take its settings from a DeepSpeed JSON file?", YES_NO, False, _USED),
    _row(f"{_D}deepspeed_config_file", "Path of that file", TEXT, "none", _is("_deepspeed_file", True)),
    _row(f"{_D}zero_stage", "Stage of ZeRO", _words(range(4)), 2, _FIELDS),
    _row(f"{_D}offload_optimizer_device", "Offload the optimizer's states to", _DEVICES, None, _DIVIDED),
    _row(f"{_D}offload_param_device", "Offload the parameters to", _DEVICES, None, _DIVIDED),
    _row(f"{_D}offload_param_nvme_path", "NVMe folder for parameters", TEXT, "/nvme", _NVME_PARAM),
    _row(f"{_D}offload_optimizer_nvme_path", "NVMe folder for optimizer states", TEXT, "/nvme", _NVME_OPTIMIZER),
    _row(f"{_D}gradient_accumulation_steps", "Micro-batches of one optimizer step", WHOLE, 1, _FIELDS),
    _row("_clipping", "Clip gradients?", YES_NO, False, _FIELDS),
    _row(f"{_D}gradient_clipping", "Largest norm of the gradients", NUMBER, 1.0, _is("_clipping", True)),
    _row(f"{_D}zero3_save_16bit_model", "Save the model in 16 bits?", YES_NO, False, _is(f"{_D}zero_stage", 3)),
    _row(f"{_D}zero3_init_flag", "Divide parameters while a model is built (zero.Init)?", YES_NO, False, _USED),
    _row("_moe", "Train a mixture of experts (MoE)?", YES_NO, False, _USED),
    _row(f"{_D}deepspeed_moe_layer_cls_names", "Classes of MoE layers, such as A,B", TEXT, None, _is("_moe", True)),
    _row(f"{_D}deepspeed_multinode_launcher", "DeepSpeed's launcher", _words(_LAUNCHERS), None, _USED, _SEVERAL),
    _row(f"{_D}deepspeed_hostfile", "Host file (a line: `host slots=2`)", TEXT, None, _HOSTS),
    _row("_exclusion", "Leave out hosts or devices of that file?", YES_NO, False, _HOSTS),
    _row(f"{_D}deepspeed_exclusion_filter", "What to leave out, such as host2:0,1", TEXT, None, _EXCLUDED),
    _row("_inclusion", "Use only some hosts or devices of that file?", YES_NO, False, _HOSTS),
    _row(f"{_D}deepspeed_inclusion_filter", "What to use, such as host1@host2", TEXT, None, _INCLUDED),
)

_F = "fsdp_config.fsdp_"
_OF_BOTH = _is("_fsdp", True)
_OF_1 = _is(f"{_F}version", 1)
_OF_2 = _is(f"{_F}version", 2)
_BY_CLASS = _is(f"{_F}auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
_BY_SIZE = _is(f"{_F}auto_wrap_policy", "SIZE_BASED_WRAP")
_NAMED = _is("_no_split_modules", False)
_LOADED_EVERYWHERE = _is(f"{_F}cpu_ram_efficient_loading", False)
_FSDP = (
    _row("_fsdp", "Use FSDP?", YES_NO, False, _type_is(*_ACCELERATORS), problem=_without_engine("_fsdp")),
    _row(f"{_F}version", "Version of FSDP", {"FSDP1": 1, "FSDP2": 2}, 2, _OF_BOTH),
    _row(f"{_F}reshard_after_forward", "Sharding", _words(word_lists.FSDP_SHARDING_STRATEGY), None, _OF_1),
    _row(f"{_F}reshard_after_forward", "Free gathered parameters after the forward pass?", YES_NO, True, _OF_2),
    _row(f"{_F}offload_params", "Offload parameters and gradients to the CPU?", YES_NO, False, _OF_BOTH),
    _row(f"{_F}auto_wrap_policy", "How to find the units", _words(word_lists.FSDP_AUTO_WRAP_POLICY), None, _OF_BOTH),
    _row("_no_split_modules", "Wrap `_no_split_modules` of the model? (transformers)", YES_NO, False, _BY_CLASS),
    _row(f"{_F}transformer_layer_cls_to_wrap", "Classes of the units, such as A,B", TEXT, None, _BY_CLASS, _NAMED),
    _row(f"{_F}min_num_params", "Fewest parameters of a unit", WHOLE, 100_000_000, _BY_SIZE),
    _row(f"{_F}backward_prefetch", "Prefetch in backward", _words(word_lists.FSDP_BACKWARD_PREFETCH), None, _OF_1),
    _row(f"{_F}state_dict_type", "Type of the state dict", _words(word_lists.FSDP_STATE_DICT_TYPE), None, _OF_1),
    _row(f"{_F}state_dict_type", "Type of the state dict", _words(word_lists.FSDP2_STATE_DICT_TYPE), None, _OF_2),
    _row(f"{_F}forward_prefetch", "Prefetch in the forward pass?", YES_NO, False, _OF_1),
    _row(f"{_F}use_orig_params", "Keep the original parameters (`use_orig_params`)?", YES_NO, True, _OF_1),
    _row(f"{_F}cpu_ram_efficient_loading", "Load weights on rank 0 alone? (transformers)", YES_NO, True, _OF_BOTH),
    _row(f"{_F}sync_module_states", "Send rank 0's parameters to all?", YES_NO, True, _OF_1, _LOADED_EVERYWHERE),
    _row(f"{_F}activation_checkpointing", "Recompute activations in backward?", YES_NO, False, _OF_BOTH),
)

_P = "parallelism_config.parallelism_config_"
_SIZED = _is("_parallelism", True)
_METHODS = _words(["allgather", "alltoall"])
_PARALLELISM = (
    _row("_parallelism", "Set the sizes of the parallel axes?", YES_NO, False, _OF_2),
    _row(f"{_P}dp_replicate_size", "Size of data parallel (replicas)", WHOLE, 1, _SIZED),
    _row(f"{_P}dp_shard_size", "Size of FSDP (shards)", WHOLE, 1, _SIZED),
    _row(f"{_P}tp_size", "Size of tensor parallel", WHOLE, 1, _SIZED),
    _row(f"{_P}cp_size", "Size of context parallel", WHOLE, 1, _SIZED),
    _row(f"{_P}cp_comm_strategy", "Communication of context parallel", _METHODS, None, _above_one(f"{_P}cp_size")),
)

_GPUS = _type_is("MULTI_GPU")
_MEGATRON = _refused("_megatron", True, "use_megatron_lm")
_WITHOUT_ENGINE = _type_is("NO", *_ACCELERATORS)
_PRECISIONS = _words(["no", "fp16", "bf16", "fp8"])
_PROCESSES = (
    _row("_megatron", "Use Megatron-LM?", YES_NO, False, _GPUS, problem=_MEGATRON),
    _row("num_processes", "Processes on all machines, one for each device", WHOLE, 1, _is_divided, problem=_alone),
    _row("gpu_ids", "Devices of this machine, such as 0,1", TEXT, "all", _WITHOUT_ENGINE, _is_on_device),
    _row("enable_cpu_affinity", "Bind processes to cores near their GPUs (NUMA)?", YES_NO, False,
         _type_is("NO", "MULTI_GPU"), _is_on_device),
    _row("mixed_precision", "Precision", _PRECISIONS, None, _has_no_config_file, problem=_without_fp8),
)  # fmt: skip

CLUSTER = (*_MACHINE, *_DYNAMO, *_DEEPSPEED, *_FSDP, *_PARALLELISM, *_PROCESSES)


# -- the file ------------------------------------------------------------------------------------------------


def cluster_config(answers: Answers) -> ClusterConfig:
    """Returns the config file of the answers to `CLUSTER`."""
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": None,
        "debug": False,
        "num_processes": 1,
        "same_network": True,
        # accelerate's questions write the word and the list, not the defaults of the class.
        "downcast_bf16": "no",
        "tpu_env": [],
    }
    for name, value in answers.items():
        block, _, key = name.rpartition(".")
        if block:
            values.setdefault(block, {})[key] = value
        elif not name.startswith("_"):
            values[name] = value
    values["distributed_type"] = distributed_type(answers)
    values["use_cpu"] = uses_cpu(answers)
    if "mpirun_config" in values:
        hostfile = values["mpirun_config"]["mpirun_hostfile"]
        values["mpirun_config"]["mpirun_hostfile"] = os.path.expanduser(hostfile.strip())
    # With version 1 of FSDP, what rank 0 alone has loaded must be sent to the others, so there is no question.
    if _OF_1(answers) and answers[f"{_F}cpu_ram_efficient_loading"]:
        values["fsdp_config"]["fsdp_sync_module_states"] = True
    return ClusterConfig(**values)
