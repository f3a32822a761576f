"""What one call is and how fast a machine moves bytes: what a forecast is computed from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The largest call that the memory is planned for.

    Attributes:
        batch: rows.
        tokens: of each row, the key-value cache of earlier calls included.
    """

    batch: int = 1
    tokens: int = 1024


@dataclass(frozen=True)
class Rates:
    """How fast bytes move, in bytes a second.

    Attributes:
        memory: reading weights where the model computes; a pass over few tokens takes as long as this.
        copy: from the host's memory to an accelerator.
        disk: from the disk to the host's memory.
        source: "assumed", "stated" or "measured".
    """

    memory: float = 10e9
    copy: float = 12e9
    disk: float = 1e9
    source: str = "assumed"


def readable(nbytes: float) -> str:
    """Bytes with a unit, such as "1.2 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
