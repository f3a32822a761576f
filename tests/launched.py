"""Runs a user's program under the launcher."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from warm_python import executable


def launch(library: str, size: int, script: Path, *flags: str) -> list[str]:
    """`paceline launch` of a script for a library, or for several, on `size` processes."""
    return ["-m", "paceline", "launch", "--cpu", "-n", str(size), "--compat", library, *flags, str(script)]


def run(words: list[str], folder: Path, *, warm: Sequence[str] = (), fails: bool = False, **variables: str) -> str:
    """What a program prints, both streams together; `warm` are modules that its Python has imported already."""
    ended = subprocess.run(
        [executable(*warm), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert (ended.returncode != 0) == fails, ended.stdout[-6000:]
    return ended.stdout
