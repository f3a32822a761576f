"""`Calibration`: what one rank of this machine computes, moves and sends in a second, measured, and the file that keeps it.

    matrix      FLOP/s by dtype and by FLOP for each byte moved   all ranks measure at once, as they compute at once
    memory      bytes/s by the size of an operation               outputs are new tensors, as those of eager PyTorch
    optimizer   bytes/s of a fused step over large tensors
    overhead    seconds of an operation on a small tensor, with the Python and the autograd around it
    links       latency and bytes/s of each collective            among these ranks
    overlap     share of a collective's time that computing hides
    waiting     seconds by which ranks reach a collective at different times
    alone       how many times as fast one rank computes while the others wait

A calibration is valid for one host, kind of device, number of ranks, number of threads and release of torch, and for a
month. It has one file for each of these, below XDG_STATE_HOME (~/.local/state).
"""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import PlanError
from paceline.base.files import replace_text
from paceline.base.json_fields import read_file
from paceline.config.places import user_folder
from paceline_lens.forecast.work import Computation, Message

VERSION = 3
WITHIN_NODE, BETWEEN_NODES = "within a node", "between nodes"
_VALID_DAYS = 30
_DAY_S = 86400
_NOISY = 0.25

Curve = tuple[tuple[float, float], ...]  # (size, rate) by ascending size


@dataclass(frozen=True)
class Link:
    """The cost of one kind of collective: `latency_s` for each call, and the bytes that a rank sends at `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, count: float, calls: int = 1) -> float:
        """Seconds of `calls` calls that send `count` bytes together."""
        return calls * self.latency_s + count / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """The machine that a calibration measured, and how its ranks shared it.

    Attributes:
        host: its name.
        device: kind of device, such as "cpu" or "NVIDIA H200".
        torch: release.
        procs: ranks of the host, which share its cores and memory.
        threads: of each rank.
    """

    host: str
    device: str
    torch: str
    procs: int
    threads: int

    def differences(self, other: Machine) -> list[str]:
        """Returns how another machine differs, in words."""
        words: list[str] = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            other_value = getattr(other, entry.name)
            if other_value != value:
                words.append(f"{entry.name} {other_value}, here {value}")
        return words

    @property
    def file_name(self) -> str:
        """The name of its file. It has the numbers of ranks and threads, so that a host can have several calibrations."""
        # Names of devices have spaces and slashes.
        device = re.sub(r"[\W_]", "-", self.device)
        return f"{self.host}-{device}-{self.procs}x{self.threads}.json"


@dataclass(frozen=True)
class Calibration:
    """The measurements of one machine. Rates are those of one rank while all ranks of the machine work.

    Attributes:
        machine: where.
        measured: seconds since the epoch.
        matrix: dtype -> FLOP/s of a product by its FLOP for each byte that it reads and writes: products of few rows
            compute little with a weight that they read whole, and are slower (the roofline model of Williams et al., 2009).
        memory: bytes/s by the bytes that an operation reads and writes.
        optimizer: bytes/s of an optimizer's fused step; 0 where it was not measured.
        overhead_s: of one operation that has next to nothing to compute.
        links: collective -> its cost; empty where there was one rank.
        overlap: share of the time of a collective that is hidden where computing goes on, 0 to 1.
        wait_s: that a rank waits for the others at a collective after some milliseconds of computing.
        alone: how many times as fast a rank computes while all others wait; above 1 where ranks share memory or cores.
        attention: the rate of attention kernels, as a share of that of other products.
        prefetches: whether divided parameters travel while blocks compute, as FSDP2 sends them on accelerators; over gloo it
            waits for them.
        joined: the share of what a compiler could join of the operations between products that it does join; 0 without one.
        missing: what could not be measured, and why.
        noise: by which share a probe took longer in the middle round than in the fastest one; half of the probes were worse.
        version: of the format of the file.
    """

    machine: Machine
    measured: float
    matrix: Mapping[str, Curve]
    memory: Curve
    optimizer: float
    overhead_s: float
    links: Mapping[str, Link] = field(default_factory=dict)
    overlap: float = 0.0
    wait_s: float = 0.0
    alone: float = 1.0
    attention: float = 1.0
    prefetches: bool = False
    joined: float = 0.0
    missing: tuple[str, ...] = ()
    noise: float = 0.0
    version: int = VERSION

    def compute_seconds(self, computation: Computation) -> float:
        """Returns the seconds of one operation: of its arithmetic, or of the bytes that it moves, if these are more.

        A dtype without a measurement uses the rate of float32.
        """
        count = round(computation.bytes + self.joined * (computation.joined_bytes - computation.bytes))
        moving = count / rate_at(self.memory, count) if count else 0.0
        if not computation.flops:
            return moving
        curve = self.matrix.get(computation.dtype) or self.matrix["float32"]
        # By arithmetic intensity, in FLOP for each byte that is moved.
        rate = rate_at(curve, computation.flops / max(1, computation.bytes))
        if computation.is_attention:
            rate *= self.attention
        return max(computation.flops / rate, moving)

    def link_of(self, message: Message) -> Link | None:
        """Returns the cost of such messages; None if it is not known.

        A measured machine has a link for each operation. A datasheet has one for all messages within a node, and one for those
        between nodes.
        """
        return self.links.get(message.operation) or self.links.get(BETWEEN_NODES if message.across else WITHIN_NODE)

    def optimizer_seconds(self, count: float) -> float:
        """Returns the seconds in which an optimizer's step reads and writes so many bytes."""
        return count / (self.optimizer or rate_at(self.memory, count)) if count else 0.0

    @property
    def date(self) -> str:
        """When it was measured, for people."""
        return time.strftime("%Y-%m-%d", time.localtime(self.measured))

    @property
    def doubt(self) -> str:
        """Why the rates may be too low; "" where the rounds agree."""
        if self.noise <= _NOISY:
            return ""
        return f"the machine was busy: rounds differ by {self.noise:.0%}; measure again while nothing else runs"

    def text(self) -> str:
        """Returns the measurements as text for people."""
        machine = self.machine
        lines = [
            f"measured on {machine.host}: {machine.procs} ranks of {machine.threads} threads on {machine.device}, "
            f"torch {machine.torch}, all at once; rates are those of one rank"
        ]
        for dtype, curve in self.matrix.items():
            rates = ", ".join(f"{rate / 1e9:.0f}" for _, rate in curve)
            smallest, largest = curve[0][0], curve[-1][0]
            lines.append(
                f"  matrix products, {dtype}: {rates} GFLOP/s, from {smallest:.2g} to {largest:.2g} FLOP for each byte moved"
            )
        rates = ", ".join(f"{rate / 1e9:.1f}" for _, rate in self.memory)
        lines.append(f"  memory: {rates} GB/s, from {self.memory[0][0]:.2g} to {self.memory[-1][0]:.2g} bytes each")
        lines.append(f"  optimizer: {self.optimizer / 1e9:.1f} GB/s")
        lines.append(f"  one operation: {self.overhead_s * 1e6:.1f} us")
        for name, link in self.links.items():
            lines.append(
                f"  {name}: {link.latency_s * 1e6:.0f} us, then {link.bytes_per_s / 1e9:.2f} GB/s of what a rank sends"
            )
        if self.links:
            lines.append(f"  overlap: computing hides {self.overlap:.0%} of a collective's time")
            lines.append(
                f"  waiting: {self.wait_s * 1e6:.0f} us for the slowest rank, where computing stops for a collective"
            )
            lines.append(f"  alone: a rank computes {self.alone:.2f} times as fast while the others wait")
        lines += [f"  not measured: {what}" for what in self.missing]
        if self.doubt:
            lines.append(f"  {self.doubt}")
        return "\n".join(lines)


def rate_at(curve: Curve, size: float) -> float:
    """Returns the rate at a size.

    Between two measured sizes it interpolates linearly over the logarithm of the size; beyond them it returns the nearest
    rate.
    """
    place = bisect_left([measured_size for measured_size, _ in curve], size)
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    low, rate_low = curve[place - 1]
    high, rate_high = curve[place]
    # Sizes grow by factors from one measurement to the next, so that the logarithm spaces them evenly.
    share = math.log(size / low) / math.log(high / low)
    return rate_low + share * (rate_high - rate_low)


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """The result of a search for a calibration: the calibration or None, and the reason in both cases."""

    calibration: Calibration | None
    reason: str


def calibration_folder() -> Path:
    """Returns the user's folder of calibrations."""
    return user_folder(environment.snapshot(), "XDG_STATE_HOME", ".local/state") / "paceline" / "calibration"


def save(calibration: Calibration, folder: Path | None = None) -> Path:
    """Saves a calibration, and replaces an earlier one of the same machine.

    Raises:
        PlanError: `calibration-write`.
    """
    folder = calibration_folder() if folder is None else folder
    path = folder / calibration.machine.file_name
    try:
        replace_text(path, json.dumps(asdict(calibration), indent=1) + "\n")
    except OSError as error:
        raise PlanError(
            "calibration-write",
            f"the calibration cannot be written to {path}.",
            why=error.strerror or str(error),
            fix="name a folder that you may write to: `XDG_STATE_HOME=/path/to/a/folder paceline plan --measure ...`",
        ) from error
    return path


def find(machine: Machine, folder: Path | None = None, now: float | None = None) -> Lookup:
    """Finds the calibration of a machine, and says why it is used or not. A damaged file counts as none, and is named."""
    folder = calibration_folder() if folder is None else folder
    path = folder / machine.file_name
    remedy = f"`paceline plan --measure --procs {machine.procs}` measures"
    if not path.is_file():
        others = []
        if folder.is_dir():
            others = sorted(other.name for other in folder.glob(f"{machine.host}-*.json"))
        beside = f"; there is {', '.join(others)} for other ranks or threads" if others else ""
        return Lookup(None, f"there is no calibration {path}{beside}; {remedy}")
    try:
        calibration = read(path)
    except (OSError, ValueError) as error:
        return Lookup(None, f"{path} is not used: it cannot be read ({error}); {remedy} anew")
    of_when = f"{path} of {calibration.date}"
    differences = machine.differences(calibration.machine)
    if differences:
        return Lookup(None, f"{of_when} is not used: it was measured with {', '.join(differences)}; {remedy} anew")
    if now is None:
        now = time.time()
    age_days = (now - calibration.measured) / _DAY_S
    if age_days > _VALID_DAYS:
        return Lookup(None, f"{of_when} is not used: it is {age_days:.0f} days old; {remedy} anew")
    return Lookup(calibration, of_when)


def read(path: Path) -> Calibration:
    """Reads a calibration from its file.

    Raises:
        OSError, ValueError: the file is damaged, or of another version.
    """
    calibration: Calibration = read_file(Calibration, json.loads(path.read_text(encoding="utf-8")), "it")
    if calibration.version != VERSION:
        raise ValueError(f"version {calibration.version}, expected {VERSION}")
    # Values that are not positive would divide by zero, or have no logarithm.
    for curve in (calibration.memory, *calibration.matrix.values()):
        if not curve or any(size <= 0 or rate <= 0 for size, rate in curve):
            raise ValueError("sizes and rates have to be above zero")
    if "float32" not in calibration.matrix:
        raise ValueError("it has no rate of float32")
    return calibration
