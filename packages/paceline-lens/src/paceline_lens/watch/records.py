"""The format of the journal of a watched run: `line_of` writes a record as a line, and `record_of` reads it.

A line is one JSON object, `{"t": unix seconds, "kind": "tick", ...}`; its other keys are the fields of one class below. JSON
has no numbers for floats that are not finite: they are the strings "nan", "inf" and "-inf". A reader leaves out kinds and keys
that it does not know, and gives missing keys their defaults. So lines may get new keys without a new version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from paceline.base.json_fields import read_file

# It increases when a reader of the older version would show something wrong. New kinds and keys need no new version.
VERSION = 1


@dataclass(frozen=True)
class JournalRecord:
    """The content of a line, without its time."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Hello(JournalRecord):
    """A rank has started. It is written by each rank, at its start and after each restart.

    Attributes:
        device: name of the device and of its model, such as "cuda:0 NVIDIA H200".
        restart: how often the processes had been started again before.
        peak_flops: floating-point operations a second that the device can do at best; None where it is not known.
        memory_bytes: memory of the device; None where it is not known.
        base_bytes: of a process on the CPU, what it held as the recording began: Python and its libraries. None on other
            devices, whose memory is counted by the tensors in it.
    """

    kind: ClassVar[str] = "hello"
    rank: int = 0
    node: int = 0
    host: str = ""
    local_rank: int = 0
    pid: int = 0
    device: str = ""
    restart: int = 0
    peak_flops: float | None = None
    memory_bytes: int | None = None
    base_bytes: int | None = None


@dataclass(frozen=True)
class PlanMade(JournalRecord):
    """`prepare` has decided the plan. It is written by rank 0.

    Attributes:
        text: what `Plan.explain` prints.
        reasons: rows of field, value, source, reason.
        step_ms: forecast of a step; None without one.
        memory_bytes: forecast of a rank's peak; None without one.
        flops: floating-point operations of one step of one rank; None where they are not known.
        has_activations: whether `memory_bytes` includes activations, which only `paceline plan` forecasts.
    """

    kind: ClassVar[str] = "plan"
    text: str = ""
    reasons: list[list[str]] = field(default_factory=list)
    step_ms: float | None = None
    memory_bytes: int | None = None
    flops: float | None = None
    has_activations: bool = False


@dataclass(frozen=True)
class Tick(JournalRecord):
    """What a rank did since its last tick. Each rank writes one a second, also while no step ends.

    Attributes:
        step: optimizer steps that have ended, those before a resume included.
        total: steps of the whole run; None where it is not known.
        samples, tokens: consumed so far, counted over all ranks; None where they are not known.
        phase: which part of a step runs now.
        phase_s: for how long it has run.
        ms: phase -> milliseconds since the last tick.
        waits: the same, of the time inside collectives alone; it is estimated, by looks at the training thread.
        steps: steps that have ended since the last tick.
        memory, memory_peak: bytes of the device, or of the process where the device is the CPU.
        at: file and line where the rank waits, where it has waited for more than 5 seconds; else "".
    """

    kind: ClassVar[str] = "tick"
    step: int = 0
    total: int | None = None
    samples: int | None = None
    tokens: int | None = None
    phase: str = "rest"
    phase_s: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    memory: int | None = None
    memory_peak: int | None = None
    at: str = ""
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ValuesLogged(JournalRecord):
    """Numbers that were logged at a step: name -> value. It is written by rank 0."""

    kind: ClassVar[str] = "values"
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved(JournalRecord):
    """A checkpoint was written, or could not be. It is written by rank 0.

    Attributes:
        bytes: its size.
        stall_s: how long the training loop waited for it.
        save_s: from the beginning to the moment when it was complete.
        ok: whether it is complete.
        reason: why not.
    """

    kind: ClassVar[str] = "checkpoint"
    step: int = 0
    path: str = ""
    bytes: int | None = None
    stall_s: float | None = None
    save_s: float | None = None
    ok: bool = True
    reason: str = ""


@dataclass(frozen=True)
class AnomalyFound(JournalRecord):
    """A value went wrong. It is written by rank 0.

    Attributes:
        what: "nan", "loss-spike" or "gradient-norm".
        action: "log", "skip", "stop" or "rollback".
    """

    kind: ClassVar[str] = "anomaly"
    step: int = 0
    what: str = ""
    value: float | None = None
    limit: float | None = None
    action: str = "log"
    text: str = ""


@dataclass(frozen=True)
class RoundStarted(JournalRecord):
    """The processes were started, or started again. It is written by a launcher.

    Attributes:
        number: of the round, from 0.
        procs, nodes: of this round.
        restarts: how often processes had been started again after a failure.
        why: the reason of a round after the first.
        joined, lost: hosts, compared with the round before.
    """

    kind: ClassVar[str] = "round"
    number: int = 0
    procs: int = 0
    nodes: int = 1
    restarts: int = 0
    why: str = ""
    joined: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stuck(JournalRecord):
    """No step has ended for too long. It is written by a launcher or a rank.

    Attributes:
        text: where all ranks stand, in groups.
        file: where all of the report lies.
        ranks: those that hold the others up; [] where that is not known.
    """

    kind: ClassVar[str] = "stuck"
    text: str = ""
    file: str = ""
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ErrorShown(JournalRecord):
    """The error of a run, as its launcher printed it. `rank` is None where it is of no rank."""

    kind: ClassVar[str] = "error"
    rank: int | None = None
    host: str = ""
    code: str = ""
    text: str = ""


@dataclass(frozen=True)
class LauncherEnded(JournalRecord):
    """A launcher has ended."""

    kind: ClassVar[str] = "end"
    exit_code: int = 0
    why: str = ""


@dataclass(frozen=True)
class Thinned(JournalRecord):
    """First line of a file that had grown too large: its older lines stand for several that there were.

    Attributes:
        times: how often the file has been thinned.
        dropped: how many lines it has lost so far.
    """

    kind: ClassVar[str] = "thinned"
    times: int = 0
    dropped: int = 0


KINDS: dict[str, type[JournalRecord]] = {
    record.kind: record
    for record in (
        Hello, PlanMade, Tick, ValuesLogged, CheckpointSaved, AnomalyFound, RoundStarted, Stuck, ErrorShown, LauncherEnded,
        Thinned,
    )
}  # fmt: skip


# -- writing -------------------------------------------------------------------------------------------------------


def line_of(record: JournalRecord, t: float) -> bytes:
    """Returns a record as a line of the journal, with its end of line."""
    contents: dict[str, Any] = {"t": round(t, 6), "kind": record.kind}
    for entry in fields(record):
        contents[entry.name] = _plain(getattr(record, entry.name))
    return json.dumps(contents, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    """Returns a value in types of JSON. Floats keep nine digits, which a 32-bit float needs at most."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


# -- reading -------------------------------------------------------------------------------------------------------


def record_of(line: bytes) -> tuple[float, JournalRecord | None]:
    """Returns the time and the record of a line; None for a kind that this version does not know.

    Raises:
        ValueError: the line is damaged.
    """
    try:
        contents = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    stamp: _Stamp = read_file(_Stamp, contents, "line")
    if not math.isfinite(stamp.t):
        raise ValueError("it has no moment")
    kind = KINDS.get(stamp.kind)
    return stamp.t, None if kind is None else read_file(kind, contents, stamp.kind)


@dataclass(frozen=True)
class _Stamp:
    """What each line has."""

    t: float
    kind: str
