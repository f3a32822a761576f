"""Chooses a `Placement`, from the memory of each device or from a map of the caller. Pure.

choose_placement
  _balanced     all blocks fit on the devices that compute: equal shares
  _offloaded    they do not: the last device keeps as many as it can, and the others wait in host memory or on the disk
placement_from_map    the caller has decided; names, shared parameters and memory are checked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.base.errors import PlanError, Problem
from paceline.plan.fqn import inside, nearest, within
from paceline_large.inference.blocks import Block, PlacementFacts
from paceline_large.inference.placement import (
    NUM_BUFFERS,
    PlacedBlock,
    Placement,
    activation_bytes,
    cache_bytes_per_block,
)
from paceline_large.inference.workload import Rates, Workload, readable

_FIX_MEMORY = "give more in memory=, a smaller dtype or Workload, or other devices"


def choose_placement(
    facts: PlacementFacts,
    memory: Mapping[str, int],
    workload: Workload | None = None,
    rates: Rates | None = None,
) -> Placement:
    """Places each block where it fits, in this order: accelerators, host memory, the disk.

    Blocks compute on the accelerators, or on the CPU if `memory` names none. If all blocks fit, the accelerators get equal
    shares. If not, some blocks of the last accelerator are offloaded. They are spread evenly over it, so that they can be
    read while the other blocks compute.

    Args:
        facts: the model.
        memory: the bytes that each device may hold, in the order of use; "disk" has no limit unless it is named.
        workload: the largest call.
        rates: for the forecast.

    Raises:
        PlanError: `placement-memory`, with all blocks that fit nowhere.
    """
    workload = workload or Workload()
    rates = rates or Rates()
    accelerators = [device for device in memory if device not in ("cpu", "disk")]
    # Where there are accelerators, the CPU computes nothing: its memory only stores weights for them.
    devices = accelerators or ["cpu"]
    # Activations exist on every device that computes, whatever blocks it gets, so that their memory is taken off first.
    room = {}
    problems = []
    for device in devices:
        room[device] = memory.get(device, 0) - activation_bytes(facts, workload)
        if room[device] < 0:
            problems.append(_too_small(device, facts, memory, workload))
    if problems:
        raise PlanError.of(problems)

    placed = _balanced(facts, room, workload)
    num_buffers = NUM_BUFFERS
    if placed is None:
        homes = {}
        for home, size in memory.items():
            # A CPU that computes is no place to offload to: its blocks are there already.
            if home in ("cpu", "disk") and home not in devices:
                homes[home] = size
        placed, num_buffers, problems = _offloaded(facts, room, homes, workload)
        if problems:
            raise PlanError.of(problems)
    return Placement(facts, tuple(placed), dict(memory), workload, rates, num_buffers)


def placement_from_map(
    facts: PlacementFacts,
    places: Mapping[str, str],
    memory: Mapping[str, int] | None = None,
    workload: Workload | None = None,
    rates: Rates | None = None,
) -> Placement:
    """Returns the placement of a map from names of modules to "cuda:0", "cpu", "disk"; the longest matching name is used.

    Blocks at "cpu" and "disk" compute on the first accelerator of the map, or on the CPU if the map names none.

    Args:
        facts: the model.
        places: the map; "" is the name of the whole model.
        memory: the bytes that each device may hold, or None.
        workload: the largest call.
        rates: for the forecast.

    Raises:
        PlanError: `placement-name`, `placement-split`, `placement-missing`, `placement-memory`.
    """
    problems = _unknown_names(facts, places)
    accelerators = [place for place in places.values() if place not in ("cpu", "disk")]
    main_device = "cpu"
    if accelerators:
        main_device = accelerators[0]
    placed = []
    uncovered = []
    for block in facts.blocks:
        # A map may name the tensors of a module itself one by one. A block has several modules if these share a parameter.
        # Then the map must give all of them the same place.
        names = (*block.parameters, *block.buffers) if block.own else block.modules
        all_keys = [nearest(name, places) for name in names]
        keys = {key for key in all_keys if key is not None}
        homes = {places[key] for key in keys}
        if block.own:
            # Its parameters are used in many calls, so they cannot be offloaded.
            homes = {main_device if home in ("cpu", "disk") else home for home in homes}
        if None in all_keys:
            uncovered.append(block)
        elif len(homes) > 1:
            problems.append(_tied_apart(block, places))
        else:
            home = homes.pop()
            device = home
            if home in ("cpu", "disk"):
                device = main_device
            if not block.parameter_bytes:
                home = device
            written = ", ".join(map(repr, sorted(keys)))
            placed.append(PlacedBlock(block, device, home, "code", f"placement[{written}]"))
    if uncovered:
        problems.append(_not_covered(uncovered, places))
    if problems:
        raise PlanError.of(problems)
    limits = dict(memory or {})
    placement = Placement(facts, tuple(placed), limits, workload or Workload(), rates or Rates())
    # The caller's map is not changed to fit the memory: where it does not fit, that is an error before any weight is read.
    for row in placement.forecast:
        if row.budget is not None and row.peak > row.budget:
            problem = Problem(
                "placement-memory",
                f"{row.device} needs {readable(row.peak)} and may hold {readable(row.budget)}.",
                why=str(row),
                fix='move blocks to another device in the map, or write placement="auto"',
            )
            problems.append(problem)
    if problems:
        raise PlanError.of(problems)
    return placement


def _balanced(facts: PlacementFacts, room: Mapping[str, int], workload: Workload) -> list[PlacedBlock] | None:
    """Places all blocks such that the fullest device holds as little as possible; None if they do not fit."""
    if _filled(facts, room, workload) is None:
        return None
    # Bisection over the largest number of bytes on any device: free memory on each leaves room for a larger batch.
    # The blocks fit below `high` at all times, and do not fit below `low`. 64 KiB are exact enough for either.
    low = 0
    high = max(room.values())
    while high - low > 1 << 16:
        middle = (low + high) // 2
        if _filled(facts, _at_most(middle, room), workload) is None:
            low = middle
        else:
            high = middle
    return _filled(facts, _at_most(high, room), workload)


def _at_most(limit: int, room: Mapping[str, int]) -> dict[str, int]:
    """Returns the room of each device, but no more than the limit."""
    return {device: min(limit, size) for device, size in room.items()}


def _filled(facts: PlacementFacts, room: Mapping[str, int], workload: Workload) -> list[PlacedBlock] | None:
    """Places all blocks in order, each on the first device with room. Later blocks never go to an earlier device."""
    devices = list(room)
    left = dict(room)
    placed = []
    reason = "all weights fit" if len(devices) == 1 else "all weights fit; equal shares"
    for block in facts.blocks:
        cost = block.nbytes + _cache_of(block, facts, workload)
        # An earlier device is never returned to, even if it has room for a small block: activations would cross devices
        # twice.
        while devices and left[devices[0]] < cost:
            devices.pop(0)
        if not devices:
            return None
        left[devices[0]] -= cost
        placed.append(PlacedBlock(block, devices[0], devices[0], reason=reason))
    return placed


def _offloaded(
    facts: PlacementFacts, room: Mapping[str, int], homes: Mapping[str, int], workload: Workload
) -> tuple[list[PlacedBlock], int, list[Problem]]:
    """Fills all devices except the last one, of whose blocks some are offloaded, spread evenly.

    Returns:
        The placed blocks, the number of buffers, and problems.
    """
    *first_devices, last_device = room
    left = dict(room)
    placed: list[PlacedBlock] = []
    # Only the last device streams weights: buffers on several devices would take memory from all of them.
    rest = list(facts.blocks)
    for device in first_devices:
        while rest and left[device] >= rest[0].nbytes + _cache_of(rest[0], facts, workload):
            block = rest.pop(0)
            left[device] -= block.nbytes + _cache_of(block, facts, workload)
            placed.append(PlacedBlock(block, device, device, reason="fits"))

    # Caches, buffers, and parameters of modules that contain blocks cannot be offloaded: they are always on the device.
    fixed = sum(block.buffer_bytes + _cache_of(block, facts, workload) for block in rest)
    fixed += sum(block.parameter_bytes for block in rest if block.own)
    left[last_device] -= fixed
    movable = [block for block in rest if not block.own]
    if not movable:
        return [], NUM_BUFFERS, [_nothing_to_offload(rest, last_device, room[last_device], fixed)]
    repeated = [block for block in movable if block.repeated]
    # A stream buffer is as large as the largest offloaded block, which is often an embedding that is tied to the head. So only
    # repeated blocks are offloaded, if that is enough. A single buffer is the last resort, since nothing is read ahead then.
    resident: set[Block] | None = None
    largest = movable[0]
    num_buffers = 1
    for num_buffers in range(NUM_BUFFERS, 0, -1):
        for candidates in (repeated, movable):
            if resident is None and candidates:
                largest = max(candidates, key=lambda block: block.parameter_bytes)
                resident = _resident(movable, candidates, left[last_device] - num_buffers * largest.parameter_bytes)
        if resident is not None:
            break
    if resident is None:
        needed = fixed + largest.parameter_bytes
        return [], num_buffers, [_block_too_large(largest, last_device, room[last_device], fixed, needed)]
    offloaded = [block for block in movable if block not in resident]
    homes_of_blocks, problems = _homes(offloaded, homes)
    for block in rest:
        home = homes_of_blocks.get(block, last_device)
        if block in homes_of_blocks:
            reason = f"{last_device} is full, with {num_buffers} buffers of {readable(largest.parameter_bytes)}"
            if home == "disk" and "cpu" in homes:
                reason += "; cpu too"
        else:
            reason = "cannot be offloaded" if block.own else "fits"
        placed.append(PlacedBlock(block, last_device, home, reason=reason))
    return placed, num_buffers, problems


def _resident(movable: Sequence[Block], candidates: Sequence[Block], room: int) -> set[Block] | None:
    """Returns the blocks that stay on the device; None if even the smallest choice does not fit.

    Args:
        movable: all blocks.
        candidates: the blocks that may be offloaded; the others stay.
        room: the bytes on the device without the buffers.
    """
    # Candidates are all movable blocks, or only the repeated ones. In the second case all others must have room.
    resident = set(movable) - set(candidates)
    room -= sum(block.parameter_bytes for block in resident)
    if room < 0:
        return None
    # Other blocks than the repeated ones stay first: a call uses few rows of an embedding, but would copy all of them.
    for block in candidates:
        if not block.repeated and block.parameter_bytes <= room:
            resident.add(block)
            room -= block.parameter_bytes
    repeated = [block for block in candidates if block.repeated]
    return resident | set(_spread(repeated, _num_that_fit(repeated, room)))


def _num_that_fit(blocks: Sequence[Block], room: int) -> int:
    """Returns how many blocks have room, whichever blocks `_spread` chooses: the largest ones are counted first."""
    count = 0
    for block in sorted(blocks, key=lambda block: block.parameter_bytes, reverse=True):
        if block.parameter_bytes > room:
            break
        room -= block.parameter_bytes
        count += 1
    return count


def _homes(offloaded: Sequence[Block], homes: Mapping[str, int]) -> tuple[dict[Block, str], list[Problem]]:
    """Chooses where blocks are offloaded: as many as fit in host memory, spread evenly; the others on the disk."""
    num_in_memory = _num_that_fit(offloaded, homes.get("cpu", 0))
    places = dict.fromkeys(offloaded, "disk")
    places |= dict.fromkeys(_spread(offloaded, num_in_memory), "cpu")
    on_disk = [block for block, home in places.items() if home == "disk"]
    needed = sum(block.parameter_bytes for block in on_disk)
    if "disk" not in homes or needed <= homes["disk"]:
        return places, []
    problem = Problem(
        "placement-memory",
        f"{len(on_disk)} blocks of {readable(needed)} fit neither on a device, in the host's memory nor on the disk.",
        why=[f"{home} may hold {readable(size)}" for home, size in homes.items()],
        fix=_FIX_MEMORY,
    )
    return places, [problem]


def _spread(blocks: Sequence[Block], count: int) -> list[Block]:
    """Returns `count` of the blocks, at equal distances."""
    total = len(blocks)
    chosen = []
    for index, block in enumerate(blocks):
        # As in Bresenham's line: a block is chosen where the share of `count` that is due reaches the next whole number.
        due_before = index * count // total
        due_after = (index + 1) * count // total
        if due_after > due_before:
            chosen.append(block)
    return chosen


def _cache_of(block: Block, facts: PlacementFacts, workload: Workload) -> int:
    """Returns the bytes of the key-value cache that a block holds; only repeated blocks are counted as having one."""
    return cache_bytes_per_block(facts, workload) if block.repeated else 0


def _unknown_names(facts: PlacementFacts, places: Mapping[str, str]) -> list[Problem]:
    modules: list[str] = []
    own_tensors: set[str] = set()
    for block in facts.blocks:
        modules += block.modules
        if block.own:
            own_tensors.update(block.parameters, block.buffers)
    problems = []
    for key in places:
        if not key or key in own_tensors or any(within(module, key) for module in modules):
            continue
        # No block lies inside the named module. Either it is itself a part of a block, or there is no such module.
        around = [module for module in modules if module and inside(key, module)]
        if around:
            problem = Problem(
                "placement-split",
                f"{key} cannot have a device of its own.",
                why=f"it lies inside {around[0]}, a block that is placed as a whole",
                fix=f"give {around[0]} a place",
            )
        else:
            problem = Problem(
                "placement-name",
                f"the model has no module {key!r} with weights.",
                why=f"its blocks are {', '.join(block.name for block in facts.blocks[:8])}, ...",
                fix="write names of the model's modules",
            )
        problems.append(problem)
    return problems


def _not_covered(blocks: Sequence[Block], places: Mapping[str, str]) -> Problem:
    names = ", ".join(block.name for block in blocks[:8])
    more = f" and {len(blocks) - 8} more" if len(blocks) > 8 else ""
    nbytes = readable(sum(block.nbytes for block in blocks))
    return Problem(
        "placement-missing",
        f"the map gives no place to {len(blocks)} blocks with {nbytes}.",
        why=[f"it does not name {names}{more}", f"it names {', '.join(map(repr, places)) or 'nothing'}"],
        fix='add them, or "" for all that the map does not name',
    )


def _tied_apart(block: Block, places: Mapping[str, str]) -> Problem:
    given = []
    for module in block.modules:
        key = nearest(module, places)
        if key is not None:
            given.append(f"{module} = {places[key]}")
    return Problem(
        "placement-split",
        f"{block.name} cannot have several places.",
        why=["they share a parameter", *given],
        fix="give them the same place",
    )


def _too_small(device: str, facts: PlacementFacts, memory: Mapping[str, int], workload: Workload) -> Problem:
    needed = activation_bytes(facts, workload)
    return Problem(
        "placement-memory",
        f"{device} has no room for the activations of {workload.batch} x {workload.tokens} tokens.",
        why=f"they need about {readable(needed)}, and it may hold {readable(memory.get(device, 0))}",
        fix="plan for a smaller Workload(batch, tokens), or give the device more in memory=",
    )


def _block_too_large(block: Block, device: str, room: int, fixed: int, needed: int) -> Problem:
    return Problem(
        "placement-memory",
        f"{block.name} does not fit on {device}, also if it is offloaded.",
        why=[
            f"its weights have {readable(block.parameter_bytes)}, and all of them are there while it computes",
            f"caches, buffers and what cannot be offloaded need {readable(fixed)}",
            f"{device} has {readable(room)} beside the activations; {readable(needed)} would be enough",
        ],
        fix=_FIX_MEMORY,
    )


def _nothing_to_offload(blocks: Sequence[Block], device: str, room: int, needed: int) -> Problem:
    names = " and ".join(block.name for block in blocks)
    return Problem(
        "placement-memory",
        f"{names} cannot be offloaded and does not fit on {device}.",
        why=f"it needs {readable(needed)}, and {device} has {readable(room)} beside the activations",
        fix=_FIX_MEMORY,
    )
