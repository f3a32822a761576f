"""`Placement`: where each block of a model computes and where its weights wait; frozen, with a reason for each.

`choose.py` makes it, `execution.py` runs a model under it. The forecasts here are arithmetic on the facts of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.plan.plan import Decision
from paceline_large.inference.blocks import Block, PlacementFacts
from paceline_large.inference.workload import Rates, Workload, readable

# Two: one for the block that computes, one for the next, which is read meanwhile.
NUM_BUFFERS = 2


@dataclass(frozen=True)
class PlacedBlock:
    """One block and its places.

    Attributes:
        block: what is placed.
        device: where it computes, such as "cuda:0" or "cpu".
        home: where its weights are between its calls: `device` itself, "cpu" (the host's memory) or "disk".
        source: "derived", or "code" for a place that the caller gave.
        reason: why, in a few words.
    """

    block: Block
    device: str
    home: str
    source: str = "derived"
    reason: str = ""

    @property
    def offloaded(self) -> bool:
        """Whether its weights come to the device for each call."""
        return self.home != self.device

    @property
    def decision(self) -> Decision:
        """The row of `Placement.decisions`."""
        value = f"{self.home} -> {self.device}" if self.offloaded else self.device
        return Decision(self.block.name, value, self.source, reason=self.reason)


@dataclass(frozen=True)
class DeviceForecast:
    """Bytes on one device at the peak of the largest call.

    Attributes:
        device: its name; "disk" for what only files hold.
        weights: of the blocks that stay there.
        buffers: for the weights of offloaded blocks, while they and the next ones compute.
        cache: keys and values, as far as the model's config tells.
        activations: an estimate: the widest activation twice.
        budget: what the placement was allowed to use; None where there is no limit.
    """

    device: str
    weights: int = 0
    buffers: int = 0
    cache: int = 0
    activations: int = 0
    budget: int | None = None

    @property
    def peak(self) -> int:
        """All of them together."""
        return self.weights + self.buffers + self.cache + self.activations

    def __str__(self) -> str:
        parts = [f"weights {readable(self.weights)}"]
        for name in ("buffers", "cache", "activations"):
            nbytes = getattr(self, name)
            if nbytes:
                parts.append(f"{name} {readable(nbytes)}")
        limit = "" if self.budget is None else f" of {readable(self.budget)}"
        return f"{self.device}: {readable(self.peak)}{limit} ({', '.join(parts)})"


@dataclass(frozen=True)
class Placement:
    """Where each block of a model computes, and where its weights are meanwhile.

    Attributes:
        facts: the model.
        blocks: in order of definition.
        budgets: bytes that each device may hold; "disk" only where it has a limit.
        workload: the largest call that it was planned for.
        rates: how fast bytes move, for `pass_seconds`.
        num_buffers: blocks whose weights are on a device at once while they are offloaded: 2, or 1 where 2 do not fit.
    """

    facts: PlacementFacts
    blocks: tuple[PlacedBlock, ...]
    budgets: Mapping[str, int] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    rates: Rates = field(default_factory=Rates)
    num_buffers: int = NUM_BUFFERS

    @property
    def devices(self) -> tuple[str, ...]:
        """Where blocks compute, in order."""
        return tuple(dict.fromkeys(placed.device for placed in self.blocks))

    @property
    def main_device(self) -> str:
        """Where the first block computes; inputs come here, and code of the model outside of its blocks computes here."""
        return self.blocks[0].device if self.blocks else "cpu"

    @property
    def ordinary(self) -> bool:
        """Whether all of the model is on one device, so that nothing has to be brought or moved."""
        return len(self.devices) <= 1 and not any(placed.offloaded for placed in self.blocks)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One for each block."""
        return tuple(placed.decision for placed in self.blocks)

    @property
    def forecast(self) -> tuple[DeviceForecast, ...]:
        """Bytes on each device that computes or keeps weights."""
        homes = [placed.home for placed in self.blocks]
        rows = []
        for device in dict.fromkeys([*self.devices, *homes]):
            weights = sum(placed.block.parameter_bytes for placed in self.blocks if placed.home == device)
            # Buffers of a module are where it computes, also where its weights are offloaded.
            weights += sum(placed.block.buffer_bytes for placed in self.blocks if placed.device == device)
            # A stream buffer takes any offloaded block of its device, so it is as large as the largest of them.
            largest = max((_streamed_bytes(placed, device) for placed in self.blocks), default=0)
            cache = sum(_cache_bytes(self, placed) for placed in self.blocks if placed.device == device)
            activations = 0
            if device in self.devices:
                activations = activation_bytes(self.facts, self.workload)
            row = DeviceForecast(
                device=device,
                weights=weights,
                buffers=self.num_buffers * largest,
                cache=cache,
                activations=activations,
                budget=self.budgets.get(device),
            )
            rows.append(row)
        return tuple(rows)

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that are copied to accelerators in one pass."""
        # A CPU computes on the mapped files themselves, without a copy.
        offloaded = [placed for placed in self.blocks if placed.offloaded and placed.device != "cpu"]
        return sum(placed.block.parameter_bytes for placed in offloaded)

    @property
    def disk_bytes(self) -> int:
        """Bytes of weights that one pass takes from files: from the page cache while the system keeps them there."""
        return sum(placed.block.parameter_bytes for placed in self.blocks if placed.home == "disk")

    @property
    def moves(self) -> int:
        """How often activations go from one device to another in one pass, in the order of definition."""
        order = [placed.device for placed in self.blocks]
        return sum(before != after for before, after in pairwise(order))

    def pass_seconds(self, *, page_cache: bool = True) -> float:
        """Predicted seconds of a pass over few tokens, such as a step of generation.

        Such a pass is limited by memory: each weight is read once. Copies and reads of the next block go on meanwhile, so
        that the slowest of the three counts. With one buffer they cannot, and the three add up.

        Args:
            page_cache: whether the system still keeps the files' bytes in memory from the pass before.
        """
        times = [self.facts.nbytes / self.rates.memory, self.copied_bytes / self.rates.copy]
        if not page_cache:
            times.append(self.disk_bytes / self.rates.disk)
        return max(times) if self.num_buffers > 1 else sum(times)

    def explain(self) -> str:
        """Returns the whole placement as text: a heading, a line for each kind of decision, and the forecast."""
        weights = readable(self.facts.nbytes)
        lines = [f"placement of {self.facts.model}: {weights} in {len(self.blocks)} blocks"]
        # Blocks with the same decision share a line: a large transformer has a hundred of them.
        alike: dict[tuple[str, ...], list[PlacedBlock]] = {}
        for placed in self.blocks:
            decision = placed.decision
            key = (placed.block.kind, str(decision.value), decision.source, decision.reason)
            alike.setdefault(key, []).append(placed)
        for (_, value, source, reason), members in alike.items():
            nbytes = readable(sum(placed.block.nbytes for placed in members))
            why = f": {reason}" if reason else ""
            lines.append(f"  {_names(members)} ({nbytes}) = {value}  <- {source}{why}")
        lines.append(f"forecast for {self.workload.batch} x {self.workload.tokens} tokens:")
        lines += [f"  {row}" for row in self.forecast]
        moved = f"  a pass copies {readable(self.copied_bytes)} to accelerators and uses {readable(self.disk_bytes)} of files"
        lines.append(f"{moved}; activations change device {self.moves} times")
        seconds = f"  a pass over few tokens: {self.pass_seconds():.3g} s"
        if self.disk_bytes:
            seconds += f" from the page cache, {self.pass_seconds(page_cache=False):.3g} s from the disk"
        lines.append(f"{seconds} ({self.rates.source} rates)")
        return "\n".join(lines)


def activation_bytes(facts: PlacementFacts, workload: Workload) -> int:
    """An estimate of a call's activations: the widest one twice, as input and as output."""
    return 2 * workload.batch * workload.tokens * facts.widest * facts.itemsize


def cache_bytes(facts: PlacementFacts, workload: Workload) -> int:
    """Bytes of all keys and values of the largest call."""
    return workload.batch * workload.tokens * facts.cache_elements * facts.itemsize


def cache_bytes_per_block(facts: PlacementFacts, workload: Workload) -> int:
    """Returns the part of `cache_bytes` that one repeated block holds."""
    num_repeated = sum(block.repeated for block in facts.blocks)
    return cache_bytes(facts, workload) // num_repeated if num_repeated else 0


def _cache_bytes(placement: Placement, placed: PlacedBlock) -> int:
    return cache_bytes_per_block(placement.facts, placement.workload) if placed.block.repeated else 0


def _streamed_bytes(placed: PlacedBlock, device: str) -> int:
    return placed.block.parameter_bytes if placed.offloaded and placed.device == device else 0


def _names(members: list[PlacedBlock]) -> str:
    first = members[0].block
    last = members[-1].block
    if len(members) == 1:
        return first.name
    return f"{len(members)} {first.kind} from {first.name} to {last.name}"
