"""DeepSpeed's public constants: the keys of its config with their defaults, and names within its checkpoints.

`constants.txt` has a line for each, with its value as Python writes it:

    GRADIENT_CLIPPING 'gradient_clipping'
    GRADIENT_CLIPPING_DEFAULT 1.0
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any


@cache
def literals() -> dict[str, str]:
    """Maps the name of each constant to its value as Python writes it."""
    lines = Path(__file__).with_name("constants.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def __getattr__(name: str) -> Any:
    if name not in literals():
        raise AttributeError(name)
    return ast.literal_eval(literals()[name])
