"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Sequence


def lined_up(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Lines of a table: a name, a value, where it comes from, and what there is to say."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])).rstrip()
        for row in rows
    ]
