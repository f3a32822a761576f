"""`estimate` computes the bytes on a rank, and `choose` finds the cheapest plan whose bytes fit.

Both are pure. The estimate starts from a single process, and each strategy of the chain changes it (`cost`). No formula
gives the activations of a batch: a rehearsal of the whole model on one rank measures them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from paceline.base.errors import PlanError
from paceline.config.settings import RunSettings, searched_settings
from paceline.parallel.strategy import STRATEGIES, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.world.layout import AXES, given_axes, listed_axes

GIB = 2**30
# Bytes a second, at best, for what is said of a plan before it runs: PCIe 4.0 with 16 lanes in one direction, and a good
# NVMe drive.
HOST_RATE = 32e9
DISK_RATE = 3e9
_DIVIDED_BY_STAGE = {
    1: "optimizer states",
    2: "gradients and optimizer states",
    3: "parameters, gradients and optimizer states",
}


@dataclass(frozen=True)
class Need:
    """What the models of a run need, whatever the plan.

    Attributes:
        models: their facts.
        activations: bytes that one rank keeps between forward and backward without any strategy.
        states: float32 values that the optimizer keeps for each trained parameter.
        on_host: whether the device is the host itself: nothing leaves its memory but to a disk.
    """

    models: tuple[ModelFacts, ...]
    activations: int = 0
    states: float = 2.0
    on_host: bool = False

    @classmethod
    def of(cls, situation: tuple[Plan, tuple[ModelFacts, ...], bool, int, int]) -> Need:
        """Returns what the models of a run (`Run.situation`) need before a batch was seen, with Adam."""
        _, models, on_host, *_ = situation
        return cls(models, on_host=on_host)


@dataclass(frozen=True)
class Rejected:
    """A plan that was not taken: its settings, and why."""

    settings: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.settings)}: {self.reason}"


@dataclass(frozen=True)
class Chosen:
    """The result of a search.

    Attributes:
        settings: the settings of the cheapest plan that fits; None if no plan fits.
        estimate: the bytes of that plan.
        rejected: the cheaper plans, each with the reason why it was not taken.
    """

    settings: Mapping[str, Any] | None
    estimate: Bytes | None = None
    rejected: tuple[Rejected, ...] = field(default=())


def estimate(plan: Plan, need: Need) -> Bytes:
    """Returns the bytes on one rank under a resolved plan: each strategy's `cost` in turn, summed over the models."""
    if need.on_host:
        return _estimate_on_host(plan, replace(need, on_host=False))
    total = Bytes()
    # They were measured for all models together, so that only the first model counts them.
    activations = need.activations
    for facts in need.models:
        bytes_of_model = Bytes.alone(facts, need.states, activations)
        for name in plan.strategies:
            strategy: Strategy = STRATEGIES.get(name)
            bytes_of_model = strategy.cost(plan, facts, bytes_of_model)
        sums = {name: count + getattr(bytes_of_model, name) for name, count in vars(total).items()}
        total = Bytes(**sums)
        activations = 0
    return total


def _estimate_on_host(plan: Plan, need: Need) -> Bytes:
    """Returns the bytes where the device is the host. Of what leaves its memory for a disk, gradients stay."""
    to_disk = plan.offload.removeprefix("activations+") if plan.disk_folder else "no"
    left = estimate(replace(plan, offload=to_disk), need)
    if plan.offloads_parameters and plan.disk_folder:
        states_alone = replace(plan, offload=f"optimizer=disk:{plan.disk_folder}")
        left = replace(left, gradients=estimate(states_alone, need).gradients)
    return replace(left, host=0, host_traffic=0)


def choose(
    need: Need,
    world_size: int,
    local_size: int,
    usable: int,
    fixed: Mapping[str, Any] | None = None,
    opened: Sequence[str] | None = None,
    skip: Sequence[Mapping[str, Any]] = (),
    folder: str = "",
    host: int | None = None,
) -> Chosen:
    """Finds the cheapest plan that fits.

    Args:
        need: what the models need.
        world_size, local_size: the number of ranks in total, and on one node.
        usable: the bytes that each rank can use.
        fixed: settings that stay as they are.
        opened: the names of settings that may be chosen; None means all that a search can vary.
        skip: settings that are known not to fit, for example from a rehearsal.
        folder: where `offload` may keep files, if it is open; "" for nowhere.
        host: the bytes of the host's memory that each rank can use besides; None where that is not known.
    """
    if opened is None:
        opened = searched_settings()
    # A setting that is fixed and opened at once is searched.
    closed = {name: value for name, value in (fixed or {}).items() if name not in opened}
    rejected: list[Rejected] = []
    # The cheapest candidates come first, so that the first one that fits is the answer.
    for settings in candidates(world_size, local_size, closed, opened, offloads(need, folder)):
        if settings in skip:
            continue
        decisions = [Decision(name, value, "derived", "planner") for name, value in settings.items()]
        try:
            plan = draft(RunSettings.of({**closed, **settings}), decisions, world_size)
            plan = resolve(plan, need.models, STRATEGIES)
        except PlanError as error:
            rejected.append(Rejected(settings, error.problems[0].what))
            continue
        needed = estimate(plan, need)
        if needed.held > usable:
            rejected.append(Rejected(settings, f"needs {gib(needed.held)} a rank, {gib(usable)} can be used"))
        elif host is not None and needed.host > host:
            reason = f"needs {gib(needed.host)} of the host's memory a rank, {gib(host)} can be used"
            rejected.append(Rejected(settings, reason))
        else:
            return Chosen(settings, needed, tuple(rejected))
    return Chosen(None, None, tuple(rejected))


def offloads(need: Need, folder: str = "") -> list[str]:
    """Returns the values of `offload` that a search tries, in the order of what they cost.

    What waits in the host's memory leaves the device only if that is another memory, and activations count only if they were
    measured.
    """
    values = [] if need.on_host else ["optimizer", "all"]
    if folder:
        values += [f"optimizer=disk:{folder}", f"all=disk:{folder}"]
    if need.on_host or not need.activations:
        return ["no", *values]
    both = [f"activations+{value}" if "=" in value else f"{value}+activations" for value in values]
    return ["no", "activations", *(value for pair in zip(values, both, strict=True) for value in pair)]


def candidates(
    world_size: int,
    local_size: int,
    fixed: Mapping[str, Any],
    opened: Sequence[str],
    offloads: Sequence[str] = ("no",),
) -> Iterator[dict[str, Any]]:
    """Yields values of the open settings; those that need the least communication and recomputation come first.

    All that need no offload come before those that do, and `offloads` has the values of it in their order.
    """
    # Several full sets of settings may differ only in settings that are not open, and are then one candidate.
    seen: list[dict[str, Any]] = []
    for offload in offloads if "offload" in opened else (str(fixed.get("offload", "no")),):
        for full in _full_settings(world_size, local_size, fixed, opened):
            if any(str(fixed.get(name, "auto")) not in ("auto", str(full[name])) for name in full):
                continue
            if not _go_together(full, offload, world_size, "offload" in opened):
                continue
            settings = {name: value for name, value in {**full, "offload": offload}.items() if name in opened}
            if settings not in seen:
                seen.append(settings)
                yield settings


def _go_together(settings: Mapping[str, Any], offload: str, world_size: int, is_open: bool) -> bool:
    """Returns whether a ZeRO stage and a value of `offload` are tried together.

    One process has stage 3 only in order to move parameters. Where both are open, only that stage moves "all", and it moves
    all to memory or nothing.
    """
    moved, _, on_disk = offload.partition("=")
    if settings["zero"] == 3 and settings["shard"] == 1:
        return "all" in moved and world_size == 1
    if not is_open:
        return True
    if settings["zero"] == 3:
        return "optimizer" not in moved or bool(on_disk)
    return "all" not in moved


def _full_settings(
    world_size: int, local_size: int, fixed: Mapping[str, Any], opened: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields complete settings in the order of their cost, without regard to those that are fixed."""
    recomputes = ("no", "blocks") if "recompute" in opened else (fixed.get("recompute", "no"),)
    axes = given_axes()
    order = list(AXES)
    # Ranks along these stand closer together than those that read different samples.
    inside = [axis for axis in axes if order.index(axis) > order.index("shard")]
    # The size of the innermost axis changes fastest.
    tried = [_sizes(axis, world_size, local_size, fixed, opened) for axis in reversed(axes)]
    for sizes in product(*tried):
        model = dict(zip(axes, reversed(sizes), strict=True))
        if world_size % prod(sizes):
            continue
        # How many ranks of one node read different samples.
        near = max(1, local_size // prod(model[axis] for axis in inside))
        for recompute in recomputes:
            for data in _data(world_size // prod(sizes), near, fixed.get("shard", "auto")):
                yield {**data, **model, "recompute": recompute}


def _sizes(axis: str, world_size: int, local_size: int, fixed: Mapping[str, Any], opened: Sequence[str]) -> list[int]:
    """Returns the numbers of ranks along an axis that a search tries."""
    if axis not in opened:
        return [int(fixed.get(axis, 1))]
    # Along some axes ranks communicate in every layer, which only the links within a node are fast enough for.
    most = local_size if AXES[axis].searched == "node" else world_size
    return [size for size in range(1, most + 1) if most % size == 0]


def _data(width: int, near: int, shard: int | str) -> Iterator[dict[str, Any]]:
    """Yields ways of using `width` ranks that read different samples, of which `near` are on one node."""
    if shard != "auto" and int(shard) > 1:
        if width % int(shard) == 0:
            for zero in (1, 2, 3):
                yield {"replicate": width // int(shard), "shard": int(shard), "zero": zero}
        return
    # In the order of communication. Stages 1 and 2 send as much as data parallelism, stage 3 half as much again; but less of
    # it crosses nodes if each node has a copy of the model.
    yield {"replicate": width, "shard": 1, "zero": 0}
    if width == 1:
        yield {"replicate": 1, "shard": 1, "zero": 3}  # see `_go_together`
    if width > 1:
        yield {"replicate": 1, "shard": width, "zero": 1}
        yield {"replicate": 1, "shard": width, "zero": 2}
        if 1 < near < width and width % near == 0:
            yield {"replicate": width // near, "shard": near, "zero": 3}
        yield {"replicate": 1, "shard": width, "zero": 3}


def settings_of(plan: Plan) -> dict[str, Any]:
    """Returns the settings of a plan, as `draft` takes them."""
    settings: dict[str, Any] = dict(plan.layout.sizes())
    settings |= {name: getattr(plan, name) for name in ("accumulate", "recompute", "offload", "compile")}
    settings["mixed_precision"] = plan.precision
    if plan.zero:
        settings["zero"] = plan.zero
    return settings


def division_of(plan: Plan, facts: ModelFacts, on_host: bool = False) -> str:
    """Describes in one line how a run divides a model over the ranks, and what one rank holds then.

    The line is "" if every rank holds the whole model and computes whole samples.

    Args:
        plan: the resolved plan.
        facts: the facts of the model.
        on_host: as in `Need`.
    """
    layout = plan.layout
    divisions: list[str] = []
    if plan.fully_sharded:
        # FSDP2 shards parameters whatever the stage. It also shards them over the ranks along `ep` and `cp`, which hold the
        # same ones.
        ranks = layout.size("shard", "ep", "cp")
        divisions.append(f"zero={plan.zero} divides {_DIVIDED_BY_STAGE[3]} over {ranks} ranks")
    elif layout.shard > 1:
        divisions.append(f"zero={plan.zero} divides {_DIVIDED_BY_STAGE[plan.zero]} over {layout.shard} ranks")
    for axis in listed_axes():
        size = layout.size(axis.name)
        if size > 1 and axis.divides:
            divisions.append(f"{axis.name}={size} divides {axis.divides} over {size} ranks")
    if not divisions or not facts.trainable:
        return ""
    needed = estimate(plan, Need((facts,), on_host=on_host))
    at_rest = (needed.parameters + needed.gradients + needed.optimizer) / facts.parameters
    return (
        f"{facts.name} ({_count(facts.parameters)} parameters): {', '.join(divisions)}; about {at_rest:.1f} bytes a "
        "parameter on each, with Adam and without activations. `accelerator.plan.explain()` says more."
    )


def _count(number: int) -> str:
    """Returns a number of parameters in words."""
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def shown(settings: Mapping[str, Any], named: Sequence[str] = ()) -> str:
    """Returns settings as command-line flags, without those that have their usual value and are not among `named`."""
    is_whole = settings.get("shard") == 1
    plain = {"zero": (0,) if is_whole else (0, 3), "recompute": ("no",), "offload": ("no",)}
    flags = []
    for name, value in settings.items():
        if name in named or value not in plain.get(name, (1,)):
            flags.append(f"--{name} {value}")
    return " ".join(flags) or "one process, as it is"


def moving_s(needed: Bytes) -> float:
    """Returns how many seconds a step moves what waits outside of the device's memory, at least."""
    return needed.host_traffic / HOST_RATE + needed.disk_traffic / DISK_RATE


def elsewhere(needed: Bytes) -> list[str]:
    """Says what a plan keeps outside of the device's memory, and how long it takes at least to move it: a line for the host's
    memory, and one for files."""
    lines: list[str] = []
    if needed.host:
        seconds = needed.host_traffic / HOST_RATE
        lines.append(
            f"{gib(needed.host)} of each rank wait in the host's memory, and a step copies {gib(needed.host_traffic)} from "
            f"and to it, which takes {seconds:.2g} s at {HOST_RATE / 1e9:.0f} GB/s"
        )
    if needed.disk:
        seconds = needed.disk_traffic / DISK_RATE
        lines.append(
            f"{gib(needed.disk)} of each rank are on disk, and a step reads and writes {gib(needed.disk_traffic)}, which "
            f"takes {seconds:.2g} s at {DISK_RATE / 1e9:.0f} GB/s"
        )
    return lines


def gib(count: float) -> str:
    """Returns a number of bytes as text, in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
