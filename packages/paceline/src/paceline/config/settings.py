"""Every setting, defined once: its default, its kind, one sentence, and its names on the command line and elsewhere.

A setting `main_port` is `--main-port` (or `--main_port`) on the command line, `PACELINE_MAIN_PORT` in the environment
and `main_port` in a file. `config/schema.py` derives the options and the docs table from here. The names that other
libraries use for it are defined in their dialects (`config/dialects.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

from paceline.base.registry import Registry
from paceline.config.clusters import CLUSTERS
from paceline.config.dialects import dialects
from paceline.config.kinds import (
    ADDRESSES,
    OPTIONS,
    YES_NO,
    Kind,
    Registered,
    matching,
    one_of,
    seconds,
    some_of,
    whole,
    whole_or_range,
)
from paceline.config.libraries import LIBRARIES
from paceline.world.layout import AXES, DATA_AXES, Axis, given_axes, listed_axes

# Each precision is a file in `paceline/precision/`. This package must work without torch, so it uses only the names of
# these files and never imports them.
PRECISIONS = Registry("paceline.precisions", "precision")

_OFFLOAD = (
    r"no|auto(=disk:.+)?|optimizer|all|activations|optimizer\+activations|all\+activations"
    r"|(activations\+)?(optimizer|all)=disk:.+"
)
OnHang = Literal["report", "restart", "leave"]

# Other launchers count the processes of all nodes together under this name; `procs` counts those of each node.
TOTAL = "num_processes"


@dataclass(frozen=True)
class Setting:
    """Describes one setting.

    Attributes:
        name: its name; a field of `RunSettings`, of `LaunchSettings` or of a launcher's own settings class.
        default: its value if no source gives one.
        kind: how its text is parsed.
        doc: one sentence that says what it does.
        group: heading under which `--help` and the docs list it.
        short: a one-letter flag, such as "-n"; "" for none.
        in_file: whether a config file may hold it.
        spelling: name of the flag, if it differs from the name of the setting; "" if it does not.
    """

    name: str
    default: Any
    kind: Kind
    doc: str
    group: str
    short: str = ""
    in_file: bool = True
    spelling: str = ""

    @property
    def flag(self) -> str:
        """Its flag on the command line, such as `--main-port`."""
        return "--" + (self.spelling or self.name).replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable, such as `PACELINE_MAIN_PORT`."""
        return f"PACELINE_{self.name.upper()}"

    @property
    def aliases(self) -> list[str]:
        """Names that other libraries use for it, both as flags and as keys of a file."""
        aliases: list[str] = []
        for dialect in dialects():
            aliases += [alias for alias, name in dialect.aliases.items() if name == self.name]
        return aliases

    @property
    def other_variables(self) -> list[str]:
        """Environment variables of other libraries for it; `variable` overrides all of them."""
        variables: list[str] = []
        for dialect in dialects():
            variables += [variable for variable, name in dialect.variables.items() if name == self.name]
        return variables


def own_name(name: str) -> str:
    """Returns the setting that a name stands for: a setting's own name or another library's; "" if there is none."""
    # Those of the run first: a training process asks for no others, and need not load those of single launchers.
    if name in settings_of(RunSettings) or name in settings_of():
        return name
    if name == TOTAL:
        return "procs"
    for dialect in dialects():
        if name in dialect.aliases:
            return dialect.aliases[name]
    return ""


def setting(default: object, kind: Kind, doc: str, group: str, **names: object) -> Any:
    """Declares a field of a settings class; `names` are the remaining attributes of `Setting`."""
    metadata = {"kind": kind, "doc": doc, "group": group, **names}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def launch_classes() -> tuple[type, ...]:
    """Returns the classes of the settings that `paceline launch` uses itself: `LaunchSettings`, then one per launcher."""
    return (LaunchSettings, *CLUSTERS)


def settings_of(*classes: type) -> Mapping[str, Setting]:
    """Returns all settings of `classes` (of all classes if none is named), by name, in order of definition."""
    # The axes are a part of the cache's key, because a new entry of `AXES` is a new setting.
    return _settings_of(classes or (*launch_classes(), RunSettings), tuple(listed_axes()))


@cache
def _settings_of(classes: tuple[type, ...], axes: tuple[Axis, ...]) -> Mapping[str, Setting]:
    settings: dict[str, Setting] = {}
    for cls in classes:
        for definition in fields(cls):
            if definition.name == "axes":
                for axis in axes:
                    settings[axis.name] = Setting(axis.name, axis.default, whole(1, auto=True), axis.doc, _LAYOUT)
                continue
            default = definition.default
            if definition.default_factory is not MISSING:
                default = definition.default_factory()
            settings[definition.name] = Setting(definition.name, default, **definition.metadata)
    return settings


def searched_settings() -> list[str]:
    """Returns the settings whose values a search for a plan may choose."""
    following = [name for name in DATA_AXES if AXES[name].default == "auto"]
    searched = [name for name in given_axes() if AXES[name].searched]
    return [*following, "zero", *searched, "recompute", "offload"]


_PROCESSES, _NODES, _SUPERVISION, _LAUNCH = "processes", "several nodes", "logs and restarts", "what to launch"
_DEVICE, _LAYOUT, _MEMORY, _DATA = "precision and devices", "layout", "memory and speed", "data"


@dataclass(frozen=True)
class RunSettings:
    """Holds the settings of one training run. `Accelerator` reads them, with any launcher or without one."""

    mixed_precision: str = setting(
        "no", Registered(PRECISIONS),
        "Precision of the model's arithmetic: float32 (no), float16 with loss scaling, bfloat16, or products in float8.",
        _DEVICE,
    )  # fmt: skip
    accumulate: int = setting(
        1, whole(1), "Micro-batches in one optimizer step.", _DATA,
    )  # fmt: skip
    cpu: bool = setting(
        False, YES_NO, "Runs on the CPU, even if there is an accelerator.", _DEVICE,
    )  # fmt: skip
    debug: bool = setting(
        False, YES_NO, "Checks before each collective that all ranks call the same one; explains hangs.", _DEVICE,
    )  # fmt: skip
    timeout_s: float | None = setting(
        None, seconds(), "Seconds after which a collective fails if some rank does not call it; not set: 600.",
        _DEVICE,
    )  # fmt: skip
    hang_report_s: float = setting(
        30.0, seconds(zero=True),
        "Seconds that a rank waits for others until the log says which rank waits where, and for which one; 0: never.", _DEVICE,
    )  # fmt: skip
    stuck_after: str = setting(
        "20x", matching(r"\d+(\.\d+)?x?", "a number of usual steps such as 20x, or seconds; 0 for never", "Nx|SECONDS"),
        "How long no rank may do anything until the stacks of all ranks are written: so many usual steps (at least 60 s), or "
        "seconds; 0: never.", _DEVICE,
    )  # fmt: skip
    # This field stands for several settings: one for each entry of `AXES`, with the name of the axis.
    axes: Mapping[str, int | str] = field(default_factory=lambda: {axis.name: axis.default for axis in listed_axes()})
    zero: int | Literal["auto"] = setting(
        "auto", whole(0, auto=True, maximum=3),
        "What the ranks along shard divide: 1 optimizer states, 2 also gradients, 3 also parameters; auto: 3 if shard is "
        "above 1.", _LAYOUT,
    )  # fmt: skip
    recompute: str = setting(
        "no", matching(r"no|blocks|selective|[1-9]\d*", "no, blocks, selective or a number K", "no|blocks|selective|K"),
        "Computes activations again in the backward pass: those of each repeated block, of selected operations, or of every "
        "K-th block.", _MEMORY,
    )  # fmt: skip
    offload: str = setting(
        "no",
        matching(
            _OFFLOAD,
            "no, auto, optimizer, all, activations, optimizer+activations, all+activations, optimizer=disk:FOLDER, "
            "all=disk:FOLDER, one of the last two behind activations+, or auto=disk:FOLDER",
            "no|auto|optimizer|all|activations|optimizer=disk:FOLDER|all=disk:FOLDER",
        ),
        "Keeps in the host's memory what is not needed at the moment: optimizer states, or also parameters and gradients "
        "(all); activations, alone or with these. Or keeps optimizer states, or also parameters, in files. auto: no, unless no "
        "plan without it fits.",
        _MEMORY,
    )  # fmt: skip
    compile: bool = setting(False, YES_NO, "Compiles the repeated blocks, one by one.", _MEMORY)
    options: Mapping[str, Mapping[str, Any]] = setting(
        {}, OPTIONS, "An option of a strategy, such as shard.reshard=no; may be given several times.",
        _LAYOUT, spelling="option",
    )  # fmt: skip
    split_batches: bool = setting(
        False, YES_NO, "The batch size of a loader is that of all ranks together, and is divided among them.", _DATA
    )
    dispatch_batches: bool | None = setting(
        None, YES_NO, "Rank 0 reads all samples and sends each rank its part; not set: each rank reads its own.", _DATA
    )
    even_batches: bool = setting(
        False, YES_NO, "Fills the last global batch with the epoch's first samples, as accelerate does.", _DATA
    )
    data_seed: int | None = setting(
        None, whole(0), "Seed of the order of samples; not set: drawn as torch's DataLoader draws it.", _DATA
    )
    non_blocking: bool = setting(
        False, YES_NO, "Copies batches to the device without waiting for the copy to end.", _DATA
    )
    resume: str = setting(
        "auto", matching(r".+", "no, auto, or a checkpoint", "no|auto|FOLDER"),
        "What `accelerator.resume()` loads: nothing, the newest undamaged checkpoint (if there is one), or this one.",
        _SUPERVISION,
    )  # fmt: skip
    profile: str = setting(
        "no", some_of("wall-clock", "flops", "comms", "memory", none="no", every="all"),
        "What is measured during the run and printed on the main process; several are joined by commas.", _SUPERVISION,
    )  # fmt: skip

    log_system: bool = setting(
        False, YES_NO, "Adds throughput, utilisation (MFU) and memory to the values of `accelerator.log`.", _SUPERVISION
    )
    watch_dir: str | None = setting(
        None, matching(r".+", "a folder", "FOLDER"),
        "Folder in which the run is recorded, for `paceline watch`; not set: it is not recorded.", _SUPERVISION,
    )  # fmt: skip

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunSettings:
        """Builds the settings from their values by name; the names of axes stand beside the others."""
        axes = {name: value for name, value in values.items() if name in AXES}
        others = {name: value for name, value in values.items() if name not in AXES}
        return cls(axes=axes, **others)

    @classmethod
    def names(cls) -> Set[str]:
        """Returns the names of the settings of a run, axes included. Others are those of a launcher."""
        return settings_of(cls).keys()

    def by_name(self) -> dict[str, Any]:
        """Returns the values by the names of the settings; it is the inverse of `of`."""
        values = {**vars(self), **self.axes}
        del values["axes"]
        return values


@dataclass(frozen=True)
class LaunchSettings:
    """Holds the settings of `paceline launch` itself: how many processes it starts, where, and how it watches them."""

    procs: int | str = setting(
        "auto", whole(1, auto=True, maximum=4096),
        "Processes on each node; auto: one for each accelerator, or 1 without accelerators.", _PROCESSES, short="-n",
    )  # fmt: skip
    gpu_ids: str = setting(
        "all", matching(r"all|\d+(,\d+)*", "all, or numbers such as 0,2", "ID,..."),
        "Accelerators of this node to use.", _PROCESSES,
    )  # fmt: skip
    gpus_per_node: int | None = setting(
        None, whole(0),
        "Accelerators to request from a cluster for each node; also the number of processes, if procs is not set.", _PROCESSES,
    )  # fmt: skip
    threads: int | None = setting(
        None, whole(1), "CPU threads of each process; not set: OMP_NUM_THREADS, or an equal part of the node's cores.",
        _PROCESSES,
    )  # fmt: skip
    nodes: int | str = setting(
        1, whole_or_range(1, 100_000),
        "Number of nodes (hosts) that take part; start the command on each. 1:3: up to 3 may join, and the run continues "
        "while at least 1 is left.", _NODES,
    )  # fmt: skip
    node_rank: int = setting(0, whole(0), "Number of this node, from 0.", _NODES)
    main_address: str | None = setting(
        None, ADDRESSES,
        "Address of node 0, or of several nodes joined by commas; not set: this host.", _NODES,
    )  # fmt: skip
    main_port: int = setting(
        0, whole(0, maximum=65535), "Port at which node 0 listens; 0: a free port (on several nodes: 29500).", _NODES,
    )  # fmt: skip
    rdzv_backend: str = setting(
        "static", matching(r"[A-Za-z][\w-]*", "a name such as static or c10d", "NAME"),
        "How nodes are numbered: static: by --node-rank, if given; c10d: in the order of their connections, as in torchrun.",
        _NODES,
    )  # fmt: skip
    store: str | None = setting(
        None, matching(r"\w+://\S+", "etcd://HOST:2379, etcds://HOST or c10d://HOST:29400", "URL"),
        "Store on another host, where nodes find each other; half of them can then continue without the others; not set: none.",
        _NODES,
    )  # fmt: skip
    tls: str = setting(
        "no", matching(r"no|yes|[^,]+,[^,]+(,[^,]+)?", "no, yes, or the files CERT,KEY or CERT,KEY,CA", "no|yes|FILES"),
        "Encrypts the connections between the launchers of several nodes; yes: with certificates that Paceline makes.", _NODES,
    )  # fmt: skip
    rdzv_conf: str = setting(
        "", matching(r"|[^=,]+=[^,]*(,[^=,]+=[^,]*)*", "key=value pairs joined by commas", "KEY=VALUE,..."),
        "Timeouts of nodes (join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt), and run_id.",
        _NODES,
    )  # fmt: skip
    hostfile: str | None = setting(
        None, matching(r".+", "a file", "FILE"),
        "File with a line `HOST slots=N` for each host; this command starts the processes on all of them.", _NODES,
    )  # fmt: skip
    include: str = setting(
        "", matching(r".*", "HOST[:SLOT,...] joined by @", "HOST[:SLOT,...][@HOST...]"),
        "Hosts of the hostfile, or their slots, to use; not set: all.", _NODES, short="-i",
    )  # fmt: skip
    exclude: str = setting(
        "", matching(r".*", "HOST[:SLOT,...] joined by @", "HOST[:SLOT,...][@HOST...]"),
        "Hosts of the hostfile, or their slots, to leave out.", _NODES, short="-e",
    )  # fmt: skip
    launcher: str = setting(
        "ssh", matching(r"[A-Za-z]\w*", "a launcher such as ssh or slurm", "ssh|slurm|kubernetes|ray|pdsh|openmpi"),
        "Launcher that starts the processes on other hosts: on those of a hostfile, or on those that a cluster chooses.",
        _NODES, spelling="on",
    )  # fmt: skip
    wait: bool | None = setting(
        None, YES_NO,
        "Waits for the end of a job that a cluster runs; not set: yes on Kubernetes and Ray, no on SLURM.", _NODES,
    )  # fmt: skip
    launcher_args: str = setting(
        "", matching(r".*", "words, quoted as one", "WORDS"),
        "Further arguments of ssh, mpirun or srun, such as '-F ssh_config'.", _NODES,
    )  # fmt: skip
    ssh_port: int | None = setting(
        None,
        whole(1, maximum=65535),
        "Port of the ssh servers of the hosts; not set: that of ssh's own configuration.",
        _NODES,
    )
    bind_cores: str = setting(
        "no", matching(r"no|all|\d+(-\d+)?(,\d+(-\d+)?)*", "no, all, or cores such as 0-7,9", "no|all|CORES"),
        "Cores that are divided among the processes of the node; each process uses only its own.", _PROCESSES,
    )  # fmt: skip
    max_restarts: int = setting(
        0, whole(0), "How many times all processes are started again after one has failed.", _SUPERVISION
    )
    on_hang: OnHang = setting(
        "report", one_of(*get_args(OnHang)),
        "What happens to a stuck run after the report: nothing, a restart (see --max-restarts), or its end with exit code 76.",
        _SUPERVISION,
    )  # fmt: skip
    grace_s: float = setting(
        30.0, seconds(), "Seconds in which processes must save and end after SIGTERM.", _SUPERVISION
    )
    watch: bool = setting(
        False,
        YES_NO,
        "Records the run in a folder below runs/, and serves its page; `paceline watch` shows it too.",
        _SUPERVISION,
    )
    metrics_port: int | None = setting(
        None, whole(0, maximum=65535),
        "Port at which the numbers of the run are served to Prometheus (/metrics); 0: a free port; not set: none.",
        _SUPERVISION,
    )  # fmt: skip
    monitor_interval_s: float = setting(0.1, seconds(), "Seconds between two checks of the processes.", _SUPERVISION)
    log_dir: str | None = setting(
        None, matching(r".+", "a directory", "DIR"), "Directory for the output of each process.", _SUPERVISION
    )
    tee: str = setting(
        "0", matching(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", "0, 1, 2 or 3, or such as 0:3,1:1 by local rank", "STREAMS"),
        "Streams whose lines are shown with their rank, and also written to log_dir: 0 none, 1 stdout, 2 stderr, 3 both.",
        _SUPERVISION, short="-t",
    )  # fmt: skip
    ranks: str = setting(
        "all", matching(r"all|\d+(-\d+)?(,\d+(-\d+)?)*", "all, or ranks such as 0,2-3", "all|RANK,..."),
        "Ranks (over all nodes) whose output is shown; log_dir has the output of all.", _SUPERVISION,
    )  # fmt: skip
    cores: bool = setting(
        False, YES_NO, "A process that crashes writes a core file, and its backtrace (by gdb) is printed.", _SUPERVISION
    )
    config: str | None = setting(
        None, matching(r".+", "a file", "FILE"),
        "File with settings; not set: ~/.config/paceline/config.yaml if it exists.",
        _LAUNCH, in_file=False,
    )  # fmt: skip
    module: bool = setting(
        False, YES_NO, "The script is the name of a module, as after `python -m`.", _LAUNCH, short="-m", in_file=False
    )
    no_python: bool = setting(
        False, YES_NO, "The script is a program that runs without Python.", _LAUNCH, in_file=False
    )
    compat: str | None = setting(
        None, Registered(LIBRARIES, several=True),
        "Lets the script import these libraries from Paceline, without having them installed.",
        _LAUNCH,
    )  # fmt: skip
    dry_run: bool = setting(
        False, YES_NO, "Prints what would run, and the source of each value, without running it.", _LAUNCH,
        in_file=False,
    )  # fmt: skip
