"""The dialect that makes accelerate's flags, variables and config files known to Paceline's commands.

For each name it says what the name means here, that it has no effect, or that it is refused; nothing that a user wrote is
ignored silently. The fields of accelerate's engines (FSDP, ParallelismConfig, dynamo) are in `engine_fields`, those of its
DeepSpeed plugin in `deepspeed_words`. `paceline.config.dialects` says when each method is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from paceline.base.errors import Problem
from paceline.base.files import expanded
from paceline.config.dialects import ConfigDialect, Translation
from paceline.config.given import Choice, Given
from paceline.config.places import user_folder
from paceline.config.settings import own_name
from paceline_accelerate import deepspeed_words, engines
from paceline_accelerate.engine_fields import FIELDS, Field
from paceline_accelerate.kinds import DistributedType

# accelerate's name, as a flag and as a key of its files -> Paceline's setting.
_ALIASES = {
    "gradient_accumulation_steps": "accumulate",
    "use_cpu": "cpu",
    "num_cpu_threads_per_process": "threads",
    "num_machines": "nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "main_address",
    "main_process_port": "main_port",
    "deepspeed_hostfile": "hostfile",
    "deepspeed_inclusion_filter": "include",
    "deepspeed_exclusion_filter": "exclude",
    "monitor_interval": "monitor_interval_s",
    "config_file": "config",
}
# accelerate's environment variable -> Paceline's setting.
_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "accumulate",
    "ACCELERATE_USE_CPU": "cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
}

# Words of `distributed_type` for several processes, whatever the device.
_MULTI_DEVICE = [kind.value.lower() for kind in DistributedType if kind.value.startswith("MULTI_")]
_MPIRUN = "mpirun_hostfile"
_OFF = ("no", "false", "", "none", "null", "0")
# What to do instead.
_USE_ZERO = "leave it out; `--zero 1`, 2 or 3 divides optimizer states, gradients and parameters"
# Settings that say where nodes find each other, or that start the nodes themselves.
_MEETING_PLACES = ("main_address", "store", "hostfile", "include", "launcher")
# Flags that cannot be used together, and why.
_CONTRADICTIONS = (
    ("use_fsdp", "use_deepspeed", "each of them chooses the engine that divides the model"),
    ("cpu", "multi_gpu", "one asks for the CPU, the other for several accelerators"),
)
_FLOAT8 = (
    "write ao, or leave it out: `--mixed_precision fp8` uses torchao, and --option fp8.recipe=... chooses a recipe"
)
_LAUNCH_THERE = "start `paceline launch` on the machine itself"


@dataclass(frozen=True)
class Foreign:
    """Some of accelerate's names that are no settings of Paceline, and that are treated alike.

    Attributes:
        names: the names, with blanks between.
        why: what they are for, or why they are not needed.
        idle: values (in lower case) that ask for nothing, and so are not refused; None if no value is refused.
        fix: what to do instead of a value that is refused.
        takes: whether a value follows the flag on the command line; None for names that only files have.
        tell: whether a notice is given for a value in a file that is not "off".
    """

    names: str
    why: str
    idle: tuple[str, ...] | None = None
    fix: str = ""
    takes: bool | None = None
    tell: bool = False


_ROWS = (
    Foreign("same_network", "nodes are found by main_address alone", takes=False),
    Foreign("multi_gpu use_xpu", "`procs` says it", takes=False),
    Foreign("role main_training_function", "the whole script is run, whatever it is called", takes=True),
    Foreign("quiet", "there is nothing to silence: a failing rank is reported once", takes=False),
    Foreign("enable_cpu_affinity", "processes are not bound to cores; use numactl for that", takes=False, tell=True),
    Foreign("use_parallelism_config", "the sizes of the axes say it", takes=False),
    Foreign("compute_environment", "it says where the run takes place", ("local_machine",), _LAUNCH_THERE),
    Foreign(
        "distributed_type",
        "it names how accelerate divides the work",
        ("no", "deepspeed", *_MULTI_DEVICE),
        "set distributed_type to MULTI_GPU (MULTI_CPU without one)",
    ),
    Foreign("use_deepspeed", "it asks for DeepSpeed's engine", _OFF, _USE_ZERO, False),
    Foreign(
        "use_megatron_lm", "it asks for Megatron-LM's engine", _OFF, "`--tp`, `--pp` and `--zero` divide a model", False
    ),
    Foreign("gradient_clipping", "it is DeepSpeed's", _OFF, "call `accelerator.clip_grad_norm_` in the script", True),
    Foreign(
        "deepspeed_config megatron_lm_config",
        "it counts only where distributed_type asks for it",
    ),
    Foreign("fp8_backend", "torchao multiplies in float8", ("ao", *_OFF), _FLOAT8, True),
    Foreign(
        "fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim",
        "it changes no numbers: weights travel as they are, and layers whose sizes do not fit are left out",
        takes=True,
    ),
    Foreign(
        "fp8_format fp8_fp8_format fp8_margin fp8_interval fp8_amax_history_len fp8_amax_history_length fp8_amax_compute_algo "
        "fp8_amax_compute_algorithm fp8_opt_level fp8_optimization_level fp8_use_mxfp8_block_scaling",
        "it concerns TransformerEngine or MS-AMP",
        takes=True,
    ),
    Foreign("fp8_override_linear_precision", "it concerns TransformerEngine", takes=True),
    Foreign("fp8_use_autocast_during_eval", "it concerns TransformerEngine", takes=False),
    Foreign("ipex_config", "torch itself has what Intel's extension brought"),
    Foreign("mpirun_ccl", "processes talk by torch's own backends"),
    Foreign("tpu_cluster", "it asks for a pod of TPUs", _OFF, "leave it out", False),
    Foreign("env vm", "it concerns a pod of TPUs", _OFF, "leave it out", True),
    Foreign("no_tpu_cluster", "there are no TPUs here", takes=False),
    Foreign("tpu", "it asks for TPUs", _OFF, "use the CPU, or an accelerator that `torch.accelerator` knows", False),
    Foreign("downcast_bf16 tpu_use_cluster tpu_use_sudo", "it concerns TPUs alone", takes=False),
    Foreign("tpu_name tpu_zone", "it concerns TPUs alone", takes=True),
    Foreign("tpu_vm tpu_env command_file commands", "it concerns TPUs alone"),
)


def _by_name(rows: Sequence[Foreign]) -> dict[str, Foreign]:
    """Returns each row under each of its names."""
    row_of_name: dict[str, Foreign] = {}
    for row in rows:
        row_of_name |= dict.fromkeys(row.names.split(), row)
    return row_of_name


def _takes_value(rows: Mapping[str, Foreign | Field]) -> dict[str, bool]:
    """Returns for each name that is a flag whether the flag takes a value."""
    return {name: row.takes for name, row in rows.items() if row.takes is not None}


FOREIGN: Mapping[str, Foreign] = MappingProxyType(_by_name(_ROWS))

# Families of flags and keys that belong to one engine, by how their names begin.
_FAMILIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fsdp_": ("accelerate 1.15 has no such field of FSDP", "leave it out"),
        "deepspeed_": ("it configures DeepSpeed", _USE_ZERO),
        "zero_": ("it configures DeepSpeed", _USE_ZERO),
        "zero3_": ("it configures DeepSpeed", _USE_ZERO),
        "offload_": ("it configures DeepSpeed", _USE_ZERO),
        "megatron_lm_": ("it configures Megatron-LM", "leave it out; `--tp`, `--pp` and `--zero` divide a model"),
        "fp8_": ("accelerate 1.15 has no such field", "leave it out"),
        "parallelism_config_": (
            "accelerate 1.15 has no such field",
            "leave it out; the sizes of dp_replicate, dp_shard, tp, cp and sp are read",
        ),
        "aws_": ("it concerns SageMaker", _LAUNCH_THERE),
        "tpu_": ("it concerns TPUs", "leave it out"),
    }
)


class AccelerateDialect(ConfigDialect):
    """Reads accelerate's flags, variables and files; see `ConfigDialect` for each method."""

    name = "accelerate"
    aliases = _ALIASES
    variables = _VARIABLES
    flags: Mapping[str, bool] = {
        **_takes_value(FOREIGN),
        **_takes_value(FIELDS),
        **deepspeed_words.FLAGS,
        _MPIRUN: True,
    }
    shorts: Mapping[str, str] = {"quiet": "-q"}
    blocks: Mapping[str, str] = {
        "parallelism_config": "parallelism_config_",
        "dynamo_config": "dynamo_",
        "fsdp_config": "fsdp_",
        "mpirun_config": "mpirun_",
        "fp8_config": "fp8_",
    }
    together = (
        "distributed_type",
        "num_machines",
        "num_processes",
        "deepspeed_config",
        "mixed_precision",
        "fp16",
        "mpirun_config",
    )

    def names(self) -> list[str]:
        """Returns the keys of its files that are no aliases."""
        engine_keys = [name for name, row in FIELDS.items() if row.takes is not None]
        return [*FOREIGN, *engine_keys, _MPIRUN]

    def knows(self, given: Given) -> bool:
        """Returns whether a value belongs to an engine."""
        return engines.field_of(given) is not None

    def translate(self, given: Sequence[Given], nodes: int | None) -> Translation:
        """Translates the fields of its engines, and refuses several machines without an address."""
        translation = engines.translate(given, nodes)
        translation.problems += _without_address(given, nodes)
        return translation

    def judge(self, given: Given) -> Choice | Problem | None:
        """Returns why a name that is neither a setting nor a field of an engine has no effect, or is refused."""
        text = str(given.value).strip()
        foreign = FOREIGN.get(given.name)
        if foreign is None:
            for prefix, (why, fix) in _FAMILIES.items():
                if given.name.startswith(prefix):
                    return _refusal(given.name, given.where, why, fix)
            return None
        if foreign.idle is None or text.lower() in foreign.idle:
            return Choice(given.name, given.value, given.source, given.where, f"no effect here: {foreign.why}")
        shown = given.name if text.lower() == "true" else f"{given.name} {text}"
        return _refusal(shown, given.where, foreign.why, foreign.fix)

    def asks_nothing(self, unused: Choice) -> bool:
        """Returns whether a value is off, or one that `accelerate config` writes into every file."""
        foreign = FOREIGN.get(unused.field)
        is_off = str(unused.value).lower() in _OFF
        is_usual = foreign is not None and not foreign.tell
        is_usual_for_deepspeed = deepspeed_words.USUAL.get(unused.field) == unused.value
        return is_off or is_usual or is_usual_for_deepspeed

    def hand_over(self, unused: Sequence[Choice]) -> dict[str, str]:
        """Returns FSDP_* and ACCELERATE_DEEPSPEED_*, from which the plugins of a script take their fields."""
        return engines.variables_of(unused) | deepspeed_words.variables_of(unused)

    def notices(self, unused: Sequence[Choice]) -> tuple[str, ...]:
        """Returns one sentence on fields of engines that have no effect."""
        return engines.notices(unused)

    def from_env(self, env: Mapping[str, str]) -> list[Given]:
        """Returns the fields of engines that variables give."""
        return engines.from_env(env)

    def from_flags(self, flags: Sequence[Given]) -> Translation:
        """Reads the flags of its DeepSpeed plugin, and `--mpirun_hostfile`, and refuses flags that contradict each other."""
        translation = deepspeed_words.from_flags(flags)
        translation.problems += _contradictions(flags)
        for flag in flags:
            if flag.name == _MPIRUN:
                translation.add(_of_mpirun(flag))
        return translation

    def from_file(self, keys: Mapping[str, Given], flags: Sequence[Given] = ()) -> Translation:
        """Reads the blocks `deepspeed_config:`, if `distributed_type` asks for it, and `mpirun_config:`, and the key `fp16`."""
        translation = deepspeed_words.from_file(keys, flags)
        mpirun = keys.get("mpirun_config")
        # An empty block is None.
        if mpirun is not None and isinstance(mpirun.value, list):
            for entry in mpirun.value:
                if entry.name in ("hostfile", _MPIRUN):
                    translation.add(_of_mpirun(replace(entry, name=_MPIRUN)))
        translation.add(_not_distributed(keys))
        if "fp16" in keys:
            translation.add(_older_precision(keys["fp16"], "mixed_precision" in keys))
        return translation

    def default_file(self, env: Mapping[str, str]) -> Path:
        """Returns its file under HF_HOME, or under `huggingface` in XDG_CACHE_HOME (~/.cache); YAML comes before JSON."""
        cache = user_folder(env, "XDG_CACHE_HOME", ".cache")
        home = expanded(env.get("HF_HOME") or cache / "huggingface")
        folder = home / "accelerate"
        yaml_file = folder / "default_config.yaml"
        json_file = folder / "default_config.json"
        if json_file.is_file() and not yaml_file.is_file():
            return json_file
        return yaml_file


def _not_distributed(keys: Mapping[str, Given]) -> Translation:
    """Reads `distributed_type: NO`: accelerate then starts one process, also where trl's `single_gpu.yaml` says 8."""
    kind = keys.get("distributed_type")
    processes = keys.get("num_processes")
    machines = keys.get("num_machines")
    # Without quotes, YAML reads NO as false.
    if kind is None or str(kind.value).upper() not in ("NO", "FALSE"):
        return Translation()
    has_several_machines = machines is not None and str(machines.value) not in ("0", "1")
    if has_several_machines:
        return Translation()
    if processes is None:
        return Translation([Given("num_processes", 1, kind.source, kind.where)])
    if str(processes.value) in ("None", "0", "1"):
        return Translation()
    reason = "no effect here: a file with distributed_type NO asks for one process"
    unused = Choice(processes.name, processes.value, processes.source, processes.where, reason)
    return Translation([replace(processes, value=1)], unused=[unused], consumed={"num_processes"})


def _older_precision(given: Given, has_precision: bool) -> Translation:
    """Reads `fp16: true`, which files of accelerate before 0.12 have in place of `mixed_precision`."""
    translation = Translation(consumed={"fp16"})
    if has_precision or str(given.value).strip().lower() in _OFF:
        reason = "no effect here: mixed_precision says it"
        translation.unused.append(Choice(given.name, given.value, given.source, given.where, reason))
    else:
        translation.given.append(Given("mixed_precision", "fp16", given.source, given.where))
    return translation


def _of_mpirun(given: Given) -> Translation:
    """Reads the name of the file that lists the hosts for mpirun; with one, the processes are started by mpirun."""
    if str(given.value).strip().lower() in _OFF:
        reason = "no effect here: it names no file"
        unused = Choice(given.name, given.value, given.source, given.where, reason)
        return Translation(unused=[unused], consumed={_MPIRUN})
    launcher = Given("launcher", "openmpi", given.source, given.where)
    return Translation([replace(given, name="hostfile"), launcher], consumed={_MPIRUN})


def _contradictions(flags: Sequence[Given]) -> list[Problem]:
    """Returns a problem for each pair of flags that accelerate refuses and that has no meaning here."""
    where = {flag.name: flag.where for flag in flags}
    problems = []
    for first, second, why in _CONTRADICTIONS:
        if first in where and second in where:
            what = f"{where[first]} and {where[second]} cannot be used together."
            problems.append(Problem("accelerate-feature", what, why, "leave one of them out"))
    return problems


def _without_address(given: Sequence[Given], nodes: int | None) -> list[Problem]:
    """Returns a problem if `num_machines` is above 1 and nothing says where the machines find each other.

    Paceline's own `--nodes 2` may leave the address out on node 0. accelerate's flag, or the line of its config file, may not:
    such a command ends at once there, and here it would wait for the other machines.
    """
    # A flag has the name of our setting by now, a line of a file still accelerate's.
    flags = ("--num_machines", "--num-machines")
    machines = [value for value in given if value.name == "num_machines" or value.where in flags]
    is_alone = nodes is not None and nodes < 2
    if not machines or is_alone or any(own_name(value.name) in _MEETING_PLACES for value in given):
        return []
    return [
        Problem(
            "launch-address",
            "the machines do not know where they find each other.",
            f"num_machines is {machines[-1].value} ({machines[-1].where}), and main_process_ip is not set",
            "give --main_process_ip, the host name or IP address of machine 0, on all machines, and --machine_rank",
        )
    ]


def _refusal(name: str, where: str, why: str, fix: str) -> Problem:
    return Problem("accelerate-feature", f"{name} is not supported.", f"{where}: {why}", fix)


DIALECT = AccelerateDialect()
