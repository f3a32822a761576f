"""`Comms`: what the ranks send each other: how often, how much, how long, how fast.

Every collective of the process is seen (`observe.tap`), that of DDP's reducer as well as that of a script. A latency is
the time from the issue of one call to its completion, so of a call that is hidden behind computing too. For rates

    all_reduce                  algbw = 2 s / t     busbw = s / t * 2 (n - 1) / n
    all_gather, reduce_scatter  algbw = s n / t     busbw = s n / t * (n - 1) / n
    all_to_all                  algbw = s / t       busbw = s / t * (n - 1) / n
    others                      algbw = s / t       busbw = s / t

with s the bytes that this rank brings (of a reduce-scatter: gets) and n the ranks. Means leave out the fastest and the
slowest tenth of the calls, of which the first ones, which connect, are some.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from paceline.observe import tap
from paceline.observe.clock import Clock, HostClock, Moment, clock_of
from paceline.world.collectives import Collectives

_TRIMMED = 0.1

Key = tuple[str, int, int]  # an operation, its bytes, and how many ranks take part


@dataclass(frozen=True)
class Traffic:
    """The calls of one operation with one size.

    Attributes:
        op, size_bytes, ranks: what is sent, and among how many.
        count: calls.
        total_ms: their latencies together.
        mean_ms: of one call, without the fastest and the slowest tenth; 0 where no call has completed.
        algbw_gbps, busbw_gbps: gigabits per second at that mean.
        straggler_ms: of `total_ms`, what was waiting for slower ranks; None where ranks were not compared.
    """

    op: str
    size_bytes: int
    ranks: int
    count: int
    total_ms: float
    mean_ms: float
    algbw_gbps: float
    busbw_gbps: float
    straggler_ms: float | None = None


class Comms:
    """Records the collectives of this process while it is on.

    Args:
        device: where tensors of this run lie besides the CPU.
        ops: operations that are recorded; none means all.
        verbose: tells each call.
        tell: is given the lines of `verbose`.
        phase: says which part of the step is running.
        clock: of the host.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        ops: Collection[str] = (),
        verbose: bool = False,
        tell: Callable[[str], None] | None = None,
        phase: Callable[[], str] = lambda: "",
        clock: Clock | None = None,
    ) -> None:
        self.ops, self.verbose = frozenset(ops), verbose
        self._tell, self._phase = tell, phase
        self._host = clock or HostClock()
        self._clock = clock_of(device or torch.device("cpu"))
        self._calls: dict[Key, array[float]] = {}  # latencies in ms, in order of issue; nan: under way
        self._phases: dict[str, list[float]] = {}
        self._pending: deque[tuple[Moment, Moment, Callable[[float], None]]] = deque()
        self._stop_listening: Callable[[], object] | None = None

    def start(self) -> None:
        """Begins to record; ends when this object is gone, if not before."""
        if self._stop_listening is None:
            listener = _Listener(self)
            tap.listen(listener)
            self._stop_listening = weakref.finalize(self, tap.ignore, listener)

    def stop(self) -> None:
        """Ends recording; what was recorded stays."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._drain(wait=True)
        self._calls.clear()
        self._phases.clear()

    # -- what the tap tells --------------------------------------------------------------------------------------

    def issued(self, op: str, size_bytes: int, ranks: int, device: str) -> Callable[[], None]:
        if self.ops and op not in self.ops:
            return _nothing
        latencies = self._calls.setdefault((op, size_bytes, ranks), array("d"))
        number = len(latencies)
        phase = self._phase()
        latencies.append(math.nan)

        def took(ms: float) -> None:
            latencies[number] = ms
            self._phases.setdefault(phase, []).append(ms)
            if self.verbose and self._tell is not None:
                self._tell(self.line(op, size_bytes, ranks, ms))

        if device == "cpu":
            begun = self._host.now()
            return lambda: took(self._host.ms(begun, self._host.now()))
        if len(self._pending) > 256:
            self._drain()
        begin = self._clock.now()
        # It is called on a stream that waits for the collective.
        return lambda: self._pending.append((begin, self._clock.now(), took))

    def _drain(self, wait: bool = False) -> None:
        """Reads the events of what the device has finished."""
        while self._pending and (wait or self._clock.come(self._pending[0][1])):
            begin, end, took = self._pending.popleft()
            self._clock.wait(end)
            took(self._clock.ms(begin, end))
            self._clock.back(begin)
            self._clock.back(end)

    # -- what it says --------------------------------------------------------------------------------------------

    def traffic(self) -> list[Traffic]:
        """What was recorded so far on this rank, by operation and size."""
        self._drain(wait=True)
        return [_traffic(key, latencies) for key, latencies in sorted(self._calls.items())]

    def latencies_ms(self, op: str) -> list[float]:
        """Of each completed call of an operation, size by size in order of issue."""
        self._drain(wait=True)
        completed: list[float] = []
        for (name, _, _), latencies in sorted(self._calls.items()):
            if name == op:
                completed += [ms for ms in latencies if not math.isnan(ms)]
        return completed

    def by_phase(self) -> dict[str, float]:
        """Milliseconds of communication by the part of the step in which it was issued, hidden or not."""
        self._drain(wait=True)
        return {phase or "other": sum(values) for phase, values in sorted(self._phases.items())}

    def summary(self, straggler: bool = False, collectives: Collectives | None = None) -> list[Traffic]:
        """What was recorded so far.

        Args:
            straggler: compares the ranks: what a call took on the fastest of them is what communication takes, and the
                rest is waiting for slower ones.
            collectives: of all ranks, for that.

        Ranks: with `straggler` all, else any.
        """
        own = self.traffic()
        if not straggler:
            return own
        mine = {key: list(latencies) for key, latencies in self._calls.items()}
        everyone = [mine] if collectives is None else collectives.gather_object(mine)
        return [self._compared(row, everyone) for row in own]

    def _compared(self, own: Traffic, everyone: list[dict[Key, list[float]]]) -> Traffic:
        key = (own.op, own.size_bytes, own.ranks)
        # Only those who made as many calls made the same ones.
        same = [latencies[key] for latencies in everyone if len(latencies.get(key, ())) == own.count]
        fastest_ms = 0.0
        for call in zip(*same, strict=True):
            if not any(map(math.isnan, call)):
                fastest_ms += min(call)
        return replace(own, straggler_ms=max(0.0, own.total_ms - fastest_ms))

    def to_dict(
        self, straggler: bool = False, collectives: Collectives | None = None
    ) -> dict[str, dict[int, dict[str, float | None]]]:
        """Operation -> bytes -> what is known of its calls; where groups differ in size, of all of them together."""
        operations: dict[str, dict[int, dict[str, float | None]]] = {}
        for traffic in self.summary(straggler, collectives):
            values = {name: value for name, value in vars(traffic).items() if name not in ("op", "size_bytes")}
            operations.setdefault(traffic.op, {})[traffic.size_bytes] = values
        return operations

    @staticmethod
    def line(op: str, size_bytes: int, ranks: int, ms: float) -> str:
        """One call in words."""
        algbw, busbw = bandwidth(op, size_bytes, ms, ranks)
        return (
            f"comms: {op} {size(size_bytes)} among {ranks}: {ms:.2f} ms, algbw {algbw:.2f} Gbps, busbw {busbw:.2f} Gbps"
        )

    def text(self, straggler: bool = False, collectives: Collectives | None = None) -> str:
        """The table. Ranks: as `summary`."""
        heads = ["operation", "size", "ranks", "count", "total ms", "mean ms", "algbw Gbps", "busbw Gbps"]
        if straggler:
            heads.append("straggler ms")
        rows = [heads]
        for calls in self.summary(straggler, collectives):
            row = [calls.op, size(calls.size_bytes), str(calls.ranks), str(calls.count)]
            row += [
                f"{calls.total_ms:.2f}",
                f"{calls.mean_ms:.3f}",
                f"{calls.algbw_gbps:.2f}",
                f"{calls.busbw_gbps:.2f}",
            ]
            if calls.straggler_ms is not None:
                row.append(f"{calls.straggler_ms:.2f}")
            rows.append(row)
        phases = ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.by_phase().items())
        return "\n".join(["communication of this rank", *table(rows), f"issued during: {phases or 'nothing yet'}"])


class _Listener:
    """Passes on what the tap tells, and does not keep its owner alive."""

    def __init__(self, owner: Comms) -> None:
        self._owner = weakref.ref(owner)

    def issued(self, op: str, size_bytes: int, ranks: int, device: str) -> Callable[[], None]:
        owner = self._owner()
        return _nothing if owner is None else owner.issued(op, size_bytes, ranks, device)


def _nothing() -> None:
    """For calls that are not recorded."""


def _traffic(key: Key, latencies: Collection[float]) -> Traffic:
    op, size_bytes, ranks = key
    completed = [ms for ms in latencies if not math.isnan(ms)]
    mean = trimmed_mean(completed)
    rates = bandwidth(op, size_bytes, mean, ranks)
    return Traffic(op, size_bytes, ranks, len(latencies), sum(completed), mean, *rates)


def trimmed_mean(values: Collection[float], share: float = _TRIMMED) -> float:
    """The mean without the lowest and the highest `share` of the values; 0 of none."""
    cut = int(len(values) * share)
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle) if middle else 0.0


def bandwidth(op: str, size_bytes: int, ms: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in gigabits per second; see the head of this file."""
    if ms <= 0:
        return 0.0, 0.0
    rate = size_bytes * 8 / (ms * 1e6)
    share = (ranks - 1) / ranks if ranks else 0.0
    if op.startswith("all_reduce"):
        return 2 * rate, rate * 2 * share
    if op.startswith(("all_gather", "reduce_scatter")):
        return rate * ranks, rate * ranks * share
    if op.startswith("all_to_all"):
        return rate, rate * share
    return rate, rate


def size(count: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def table(rows: list[list[str]]) -> list[str]:
    """Lines with columns under each other; the first column to the left, numbers to the right."""
    widths: list[int] = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
