"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], indent: str = "", numbers: bool = False) -> list[str]:
    """Returns the lines of a table with aligned columns.

    Args:
        rows: the cells of each row.
        indent: stands before each line.
        numbers: whether all columns but the first hold numbers, which are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(cell.rjust(width) if numbers else cell.ljust(width))
        lines.append(indent + "  ".join(cells).rstrip())
    return lines
