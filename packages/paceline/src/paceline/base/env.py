"""Reads and writes environment variables by one typed table. No other module touches `os.environ`.

Every module may read. Only `launch/`, `world/rendezvous.py` and tests may write (`export`, `patched`): once the processes
run, state has named owners and does not travel by environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import ConfigError

_TRUE = {"1", "true", "yes", "y", "on", "t"}
_FALSE = {"0", "false", "no", "n", "off", "f", ""}


def parse_bool(text: str) -> bool:
    """Reads a yes/no word; raises ValueError for any other."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("one of yes/no, true/false, 1/0, on/off")


def _parse_transport(text: str) -> str:
    if text not in ("auto", "native", "pairwise"):
        raise ValueError("auto, native or pairwise")
    return text


@dataclass(frozen=True)
class Variable:
    """Describes one environment variable that Paceline reads or writes.

    Attributes:
        name: its name.
        parse: text -> value; raises ValueError for a wrong text, with a message that says which values are accepted.
        default: the value if the variable is not set.
        doc: one sentence for the reference page.
        secret: whether the value must never be printed or logged.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    secret: bool = False


_ROWS = (
    # Names that torchrun gives to each worker; `paceline launch` sets the same ones.
    Variable("RANK", int, None, "Number of this process among all processes."),
    Variable("WORLD_SIZE", int, None, "Number of all processes."),
    Variable("LOCAL_RANK", int, None, "Number of this process on its host."),
    Variable("LOCAL_WORLD_SIZE", int, None, "Number of processes on this host."),
    Variable("GROUP_RANK", int, None, "Number of this host."),
    Variable("MASTER_ADDR", str, None, "Host at which rank 0 listens."),
    Variable("MASTER_PORT", int, None, "Port at which rank 0 listens."),
    Variable("TORCHELASTIC_RUN_ID", str, None, "Set if torchelastic has started this process."),
    Variable("TORCHELASTIC_RESTART_COUNT", int, 0, "How many times the workers were started again."),
    Variable("OMP_NUM_THREADS", int, None, "Threads of one process on the CPU."),
    # Paceline's own.
    Variable(
        "PACELINE_SETTINGS", str, "", "Settings that the launcher passes to its workers, as JSON with their sources."
    ),
    Variable("PACELINE_RUN", str, "", "Unique name of this run in all its rounds; set by `paceline launch`."),
    Variable(
        "PACELINE_STACKS_DIR",
        str,
        "",
        "Folder into which the processes write their stacks and their progress; set by `paceline launch`.",
    ),
    Variable(
        "PACELINE_RUN_SECRET",
        str,
        None,
        "Secret by which the launchers of a run recognise each other, the same on every node; at least 16 characters.",
        secret=True,
    ),
    Variable(
        "PACELINE_RUN_SECRET_FILE",
        str,
        None,
        "File with this secret, which only its owner may read; without either variable, ~/.paceline/secret is used.",
    ),
    Variable(
        "PACELINE_STORE_PASSWORD",
        str,
        None,
        "Password for the store of `--store`, if its URL names a user without a password.",
        secret=True,
    ),
    Variable("PACELINE_DEBUG", parse_bool, False, "Checks every collective across ranks and explains hangs."),
    Variable(
        "PACELINE_TIMEOUT_S", float, None, "Seconds after which a collective fails if some rank does not call it."
    ),
    Variable(
        "PACELINE_TRACKER_FLUSH_S", float, 30.0, "Seconds that the end of a run waits for the server of a tracker."
    ),
    Variable("PACELINE_LOG_LEVEL", str, None, "Level of the loggers of `get_logger`, if the call does not set one."),
    Variable(
        "PACELINE_COMPAT",
        str,
        "",
        "Libraries that a script imports from Paceline: `accelerate`, `deepspeed`, joined by commas.",
    ),
    Variable(
        "PACELINE_TRANSPORT",
        _parse_transport,
        "auto",
        "For tests and rehearsals: `native` uses the backend's own collectives, as on GPUs; `pairwise` sends between pairs of "
        "ranks, as over gloo.",
    ),
)
TABLE = {row.name: row for row in _ROWS}


def register(*rows: Variable) -> None:
    """Adds rows to the table, unless it has a row of the same name already."""
    for row in rows:
        TABLE.setdefault(row.name, row)


def get(name: str, env: Mapping[str, str] | None = None) -> Any:
    """Returns the parsed value of a variable of the table, or its default if it is not set.

    Raises:
        ConfigError: `env-value`; the message names the variable, its text and the values that are accepted.
    """
    row = TABLE[name]
    text = (os.environ if env is None else env).get(name)
    if text is None:
        return row.default
    try:
        return row.parse(text)
    except ValueError as error:
        shown = "(hidden)" if row.secret else repr(text)
        raise ConfigError(
            "env-value",
            f"environment variable {name} is {shown}, which cannot be read.",
            why=f"{row.doc} expected: {error}",
            fix=f"unset {name}, or give it a value of that kind",
        ) from None


def rank_hint() -> int:
    """Returns the rank of this process as far as its environment shows it, and 0 if no launcher has set one.

    It is good enough to choose which process logs a warning. For everything else, `World.detect` finds the rank.
    """
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


def snapshot() -> dict[str, str]:
    """Returns a copy of the whole environment."""
    return dict(os.environ)


def export(values: Mapping[str, str | None]) -> None:
    """Sets variables of this process; the value None removes a variable."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


@contextmanager
def patched(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables for the length of a `with` block, and restores their old values at its end."""
    before = {name: os.environ.get(name) for name in values}
    export(values)
    try:
        yield
    finally:
        export(before)
