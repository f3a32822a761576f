"""`Comms` records the collectives of this process: how often, how many bytes, how long, how fast.

It is the profile "comms" of `Profiles`. `observe.tap` calls it for every collective of the process, also for those of DDP's
reducer. A latency is the time from the issue of a call to its completion, also for a call that computing hides. The rates
(the bus bandwidths are those of NVIDIA's nccl-tests) are

    all_reduce                  algbw = 2 s / t     busbw = s / t * 2 (n - 1) / n
    all_gather, reduce_scatter  algbw = s n / t     busbw = s n / t * (n - 1) / n
    all_to_all                  algbw = s / t       busbw = s / t * (n - 1) / n
    others                      algbw = s / t       busbw = s / t

with s the bytes of this rank's input (for a reduce-scatter: of its output), t the latency and n the number of ranks. Means
leave out the fastest and the slowest tenth of the calls: the first calls also connect, and take longer.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from paceline.base.text_table import text_table
from paceline.world.collectives import Collectives
from paceline_lens.observe import tap
from paceline_lens.observe.clock import Clock, HostClock, Moment, clock_of

_TRIMMED = 0.1
_MOST_PENDING = 256  # calls on a device whose times have not been read yet

Key = tuple[str, int, int]  # an operation, its bytes, and how many ranks take part


@dataclass(frozen=True)
class CommsTraffic:
    """The calls of one operation with one size.

    Attributes:
        op, size_bytes, ranks: the operation, the bytes of this rank, and the number of ranks that take part.
        count: the number of calls.
        total_ms: the sum of their latencies.
        mean_ms: the mean latency without the fastest and the slowest tenth; 0 if no call has completed.
        algbw_gbps, busbw_gbps: gigabits per second at that mean.
        straggler_ms: the part of `total_ms` in which this rank waited for slower ones; None if ranks were not compared.
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
        device: the device of this run's tensors.
        ops: the operations to record; empty for all.
        verbose: whether each call is reported as a line of text.
        tell: called with the lines of `verbose`.
        phase: returns which part of the step is running.
        clock: the clock of the host.
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
        self.ops = frozenset(ops)
        self.verbose = verbose
        self._tell = tell
        self._phase = phase
        self._host = clock or HostClock()
        self._clock = clock_of(device or torch.device("cpu"))
        self._calls: dict[Key, array[float]] = {}  # latencies in ms, in order of issue; NaN for calls under way
        self._phases: dict[str, list[float]] = {}  # latencies in ms by the phase of the issue
        # The begin and the end of calls on a device, with the function that gets their latency.
        self._pending: deque[tuple[Moment, Moment, Callable[[float], None]]] = deque()
        # Collectives are issued by several threads: that of the script, autograd's, that of a save in the background.
        self._lock = threading.Lock()
        self._stop_listening: Callable[[], object] | None = None

    def start(self) -> None:
        """Starts recording. It ends with `stop`, or when this object is garbage-collected."""
        if self._stop_listening is None:
            listener = _CommsListener(self)
            tap.listen(listener)
            self._stop_listening = weakref.finalize(self, tap.ignore, listener)

    def stop(self) -> None:
        """Stops recording; what was recorded stays."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._drain(wait=True)
        self._calls.clear()
        self._phases.clear()

    # -- recording -----------------------------------------------------------------------------------------------

    def issued(self, op: str, size_bytes: int, ranks: int, device: str) -> Callable[[], None]:
        """Records a call (`tap.Listener`); the function that it returns is called at the completion."""
        if self.ops and op not in self.ops:
            return _nothing
        phase = self._phase()
        with self._lock:
            latencies = self._calls.setdefault((op, size_bytes, ranks), array("d"))
            number = len(latencies)
            latencies.append(math.nan)

        def complete(ms: float) -> None:
            latencies[number] = ms
            self._phases.setdefault(phase, []).append(ms)
            if self.verbose and self._tell is not None:
                self._tell(self.line(op, size_bytes, ranks, ms))

        if device == "cpu":
            began = self._host.now()
            return lambda: complete(self._host.ms(began, self._host.now()))
        if len(self._pending) > _MOST_PENDING:
            self._drain()
        begin = self._clock.now()
        # The tap calls it on a stream that waits for the collective, so that the end is the moment of completion.
        return lambda: self._pending.append((begin, self._clock.now(), complete))

    def _drain(self, wait: bool = False) -> None:
        """Reads the latencies of the calls that the device has completed; with `wait`, waits until it has completed all."""
        while True:
            # The call is taken out before anything else: another thread may read latencies at the same time.
            try:
                begin, end, complete = self._pending.popleft()
            except IndexError:
                return
            if not wait and not self._clock.come(end):
                self._pending.appendleft((begin, end, complete))
                return
            self._clock.wait(end)
            complete(self._clock.ms(begin, end))
            self._clock.back(begin)
            self._clock.back(end)

    # -- results -------------------------------------------------------------------------------------------------

    def by_phase(self) -> dict[str, float]:
        """Returns the milliseconds of communication by the part of the step that issued it, hidden or not."""
        self._drain(wait=True)
        return {phase or "other": sum(latencies) for phase, latencies in sorted(self._phases.items())}

    def summary(self, straggler: bool = False, collectives: Collectives | None = None) -> list[CommsTraffic]:
        """Returns what this rank has recorded so far, by operation and size.

        Args:
            straggler: whether ranks are compared. The rank that comes last to a collective waits for nobody, so that its
                latency is the time of the communication. What other ranks take longer is waiting.
            collectives: the collectives of all ranks, for the comparison.

        Ranks: all if `straggler` is true, otherwise any.
        """
        self._drain(wait=True)
        traffic = [_traffic(key, latencies) for key, latencies in sorted(self._calls.items())]
        if not straggler:
            return traffic
        own_calls = {key: list(latencies) for key, latencies in self._calls.items()}
        calls_by_rank = [own_calls] if collectives is None else collectives.gather_object(own_calls)
        return [self._compared(row, calls_by_rank) for row in traffic]

    def _compared(self, own: CommsTraffic, calls_by_rank: list[dict[Key, list[float]]]) -> CommsTraffic:
        """Returns a row with the time in which this rank waited for slower ones."""
        key = (own.op, own.size_bytes, own.ranks)
        # A rank that made another number of calls, as in another group of the same size, cannot be compared call by call.
        comparable: list[list[float]] = []
        for calls in calls_by_rank:
            latencies = calls.get(key, [])
            if len(latencies) == own.count:
                comparable.append(latencies)
        fastest_ms = 0.0
        for latencies_of_call in zip(*comparable, strict=True):
            if not any(map(math.isnan, latencies_of_call)):
                fastest_ms += min(latencies_of_call)
        return replace(own, straggler_ms=max(0.0, own.total_ms - fastest_ms))

    def to_dict(
        self, straggler: bool = False, collectives: Collectives | None = None
    ) -> dict[str, dict[int, dict[str, float | None]]]:
        """Returns the fields of `CommsTraffic` by operation and bytes. Ranks: as `summary`.

        If an operation was called with the same bytes in groups of several sizes, the largest groups are listed.
        """
        operations: dict[str, dict[int, dict[str, float | None]]] = {}
        for traffic in self.summary(straggler, collectives):
            values = {name: value for name, value in vars(traffic).items() if name not in ("op", "size_bytes")}
            operations.setdefault(traffic.op, {})[traffic.size_bytes] = values
        return operations

    @staticmethod
    def line(op: str, size_bytes: int, ranks: int, ms: float) -> str:
        """Returns one call as a line of text."""
        algbw, busbw = bandwidth(op, size_bytes, ms, ranks)
        return (
            f"comms: {op} {size(size_bytes)} among {ranks}: {ms:.2f} ms, algbw {algbw:.2f} Gbps, busbw {busbw:.2f} Gbps"
        )

    def text(self, straggler: bool = False, collectives: Collectives | None = None) -> str:
        """Returns the summary as a table. Ranks: as `summary`."""
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
        issued = f"issued during: {phases or 'nothing yet'}"
        return "\n".join(["communication of this rank", *text_table(rows, numbers=True), issued])


class _CommsListener:
    """Passes calls of the tap on to a `Comms` without keeping it alive: the tap holds its listeners."""

    def __init__(self, owner: Comms) -> None:
        self._owner = weakref.ref(owner)

    def issued(self, op: str, size_bytes: int, ranks: int, device: str) -> Callable[[], None]:
        owner = self._owner()
        return _nothing if owner is None else owner.issued(op, size_bytes, ranks, device)


def _nothing() -> None:
    """Stands for the completion of a call that is not recorded."""


def _traffic(key: Key, latencies: Collection[float]) -> CommsTraffic:
    """Returns the row of all calls with one key."""
    op, size_bytes, ranks = key
    completed = [ms for ms in latencies if not math.isnan(ms)]
    mean = trimmed_mean(completed)
    rates = bandwidth(op, size_bytes, mean, ranks)
    return CommsTraffic(op, size_bytes, ranks, len(latencies), sum(completed), mean, *rates)


def trimmed_mean(values: Collection[float]) -> float:
    """Returns the mean without the lowest and the highest tenth of the values; 0 if there are no values."""
    cut = int(len(values) * _TRIMMED)
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle) if middle else 0.0


def bandwidth(op: str, size_bytes: int, ms: float, ranks: int) -> tuple[float, float]:
    """Returns algorithm and bus bandwidth in gigabits per second; see the docstring of this module."""
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
    """Returns a number of bytes as text, such as "1.50 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
