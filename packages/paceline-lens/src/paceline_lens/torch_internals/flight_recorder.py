"""torch's flight recorder: the last collectives that a process has begun, and how far they came."""

from __future__ import annotations

import json
from typing import Any

import torch._C._distributed_c10d as _c10d


def last_collectives(number: int) -> list[str]:
    """The last collectives of all groups of this process, a line each, the newest last; [] where none is recorded.

    Args:
        number: how many, at most.
    """
    text = _c10d._dump_fr_trace_json(True, False)
    entries: list[dict[str, Any]] = json.loads(text).get("entries", [])
    return [_line(entry) for entry in entries[-number:]]


def _line(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "?"))
    sizes = entry.get("input_sizes", [])
    group = entry.get("process_group", ["?"])
    number = entry.get("collective_seq_id", "?")
    # gloo's entries stay "scheduled" for ever; what has ended is retired.
    state = "completed" if entry.get("retired") else entry.get("state", "?")
    return f"{name} number {number} of group {group[0]}, input {sizes}: {state}"
