"""Flags of other launchers (torchrun, Lightning and similar ones), and what each of them means for Paceline.

A flag that means the same as one of Paceline's is accepted. The others are refused by name, and the error names the flag of
Paceline that does what they do. A name that can also stand in a file of another library belongs to its dialect instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from paceline.base.devices import ACCELERATORS
from paceline.base.errors import Problem
from paceline.base.host_port import host_and_port
from paceline.config.given import Given
from paceline.config.settings import TOTAL


def _as(name: str) -> Callable[[str], dict[str, str]]:
    """Returns a function that gives the value to one setting unchanged."""
    return lambda value: {name: value}


def _processes(value: str) -> dict[str, str]:
    """Translates torchrun's words for a number of processes (-1 means all devices) and Lightning's list of devices."""
    if "," in value:
        return {"gpu_ids": value}
    if value in ("gpu", "all", "-1", *ACCELERATORS):
        return {"procs": "auto"}
    if value == "cpu":
        return {"procs": str(os.cpu_count() or 1)}
    return {"procs": value}


def _accelerators(value: str) -> dict[str, str]:
    """Translates a number of accelerators: there is one process for each, and a cluster has to provide as many."""
    settings = _processes(value)
    # A word such as "all", or a list of devices, says nothing about how many each host of a cluster must have.
    if value.isdigit():
        settings["gpus_per_node"] = value
    return settings


def _endpoint(value: str) -> dict[str, str]:
    """Translates HOST or HOST:PORT, where an IPv6 address with a port stands in brackets, or the URL of a store."""
    if "://" in value:
        return {"store": value}
    host, port = host_and_port(value)
    if not port:
        return {"main_address": host}
    return {"main_address": host, "main_port": port}


@dataclass(frozen=True)
class Flag:
    """Describes one flag of another launcher, with all its names.

    Attributes:
        names: its names, written with underscores and separated by blanks.
        means: value -> the settings of Paceline that have the same meaning; None if there are none.
        takes: whether a value follows.
        instead: what to do instead, for a flag that is refused.
        short: a one-letter flag; "" for none.
    """

    names: str
    means: Callable[[str], dict[str, str]] | None = None
    takes: bool = True
    instead: str = ""
    short: str = ""


_ROWS = (
    # This flag passes unchanged: `sources` turns it into `procs` once the number of nodes is known.
    Flag(TOTAL),
    Flag("nproc_per_node", _processes, short="-np"),
    Flag("gpus num_gpus", _accelerators),
    Flag("nnodes num_nodes", _as("nodes")),
    Flag("master_addr", _as("main_address")),
    Flag("master_port", _as("main_port")),
    Flag("rdzv_endpoint", _endpoint),
    Flag("rdzv_id", lambda value: {"rdzv_conf": f"run_id={value}"}),
    Flag("standalone", lambda value: {"nodes": "1"}, takes=False),
    Flag("shutdown_timeout", _as("grace_s")),
    Flag("redirects", instead="`--log-dir DIR --tee 0` writes each rank's output to files alone", short="-r"),
    Flag("local_ranks_filter", instead="`--ranks 0,1` shows the output of these ranks alone, counted over all nodes"),
    Flag("duplicate_stdout_filters", instead="`--log-dir DIR` keeps each rank's output in a file; search there"),
    Flag("duplicate_stderr_filters", instead="`--log-dir DIR` keeps each rank's output in a file; search there"),
    Flag("logs_specs", instead="`--log-dir DIR` and `--tee` say where output goes"),
    Flag("log_line_prefix_template", instead="leave it out: with `--tee` each line begins with its rank"),
    Flag("print_completion", instead="`paceline completion bash` prints a shell's completion"),
    Flag("event_log_handler", instead="leave it out: restarts are reported on standard error"),
    Flag("start_method", instead="leave it out: the launcher chooses how processes start"),
    Flag("run_path", takes=False, instead="leave it out: a script is run from its path"),
    Flag("local_addr", instead="`--main-address HOST` is how nodes find each other"),
    Flag("numa_binding", instead="`--bind-cores all` gives each process cores of its own"),
    Flag("signals_to_handle", instead="leave it out: SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on"),
    Flag("virtual_local_rank", takes=False, instead="leave it out: `accelerator.device` is the process's own device"),
)
# Flags of torchrun that a pod may find in its environment. The endpoint stands before the address and the port, because
# it may repeat them, and the last value wins.
_IN_PODS = (
    "nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_id", "rdzv_conf", "rdzv_endpoint", "master_addr",
    "master_port", "max_restarts",
)  # fmt: skip


def _by_name(rows: Iterable[Flag]) -> Mapping[str, Flag]:
    """Returns each flag by each of its names."""
    by_name: dict[str, Flag] = {}
    for row in rows:
        by_name |= dict.fromkeys(row.names.split(), row)
    return MappingProxyType(by_name)


_FLAGS = _by_name(_ROWS)


def flags() -> Iterable[tuple[str, bool, str]]:
    """Yields each flag that is understood: its name, whether a value follows, and its one-letter form."""
    for row in _ROWS:
        # Only one of the names may carry the one-letter form: argparse refuses to add it twice.
        first, *others = row.names.split()
        yield first, row.takes, row.short
        for name in others:
            yield name, row.takes, ""


def takes_value(name: str) -> bool:
    """Returns whether a value follows a flag of this table."""
    return _FLAGS[name].takes


def knows(name: str) -> bool:
    """Returns whether this is the name of a flag of this table."""
    return name in _FLAGS


def translate(given: Sequence[Given]) -> tuple[Given, ...]:
    """Translates flags of this table into settings; flags that are refused, and all other flags, stay as they are."""
    translated: list[Given] = []
    rdzv_entries: list[str] = []
    for flag in given:
        row = _FLAGS.get(flag.name)
        if row is None or row.means is None:
            translated.append(flag)
        else:
            settings = row.means(str(flag.value))
            translated += [Given(name, value, flag.source, flag.where) for name, value in settings.items()]
        if translated[-1].name == "rdzv_conf":
            # torchrun's --rdzv-id is one more entry of --rdzv-conf, where otherwise the last flag wins.
            rdzv_entries.append(str(translated[-1].value))
            joined = ",".join(filter(None, rdzv_entries))
            translated[-1] = Given("rdzv_conf", joined, flag.source, flag.where)
    return tuple(translated)


def from_env(env: Mapping[str, str]) -> tuple[Given, ...]:
    """Reads torchrun's own variables for its flags, such as PET_NNODES, which Kubeflow sets in each pod."""
    given = []
    for name in _IN_PODS:
        variable = f"PET_{name.upper()}"
        if env.get(variable):
            given.append(Given(name, env[variable], "environment", variable))
    return translate(given)


def refusal(given: Given) -> Problem | None:
    """Returns the problem with a flag that has no equal in Paceline; None for every other flag."""
    row = _FLAGS.get(given.name)
    if row is None or not row.instead:
        return None
    what = f"{given.where} is a flag of another launcher, which Paceline does not have."
    return Problem("launcher-flag", what, "", row.instead)
