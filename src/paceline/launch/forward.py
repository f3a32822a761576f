"""Which variables of this host's environment go along to the others.

Those whose names begin as listed, and lines of `.deepspeed_env` in the home and in the working directory, the latter
winning. They travel inside the connection: no value stands on a command line, and none is logged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import LaunchError, Problem

PREFIXES = ("PACELINE_", "PYTHON", "OMP_", "NCCL", "GLOO", "TORCH", "UCX", "MV2", "MLFLOW")
_OURS = ("TORCHELASTIC_", "PACELINE_RUN", "PACELINE_SETTINGS", "PACELINE_ORDERS")  # of one process, not of the user
_FILE = ".deepspeed_env"


def forwarded(env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """The variables that go along.

    Args:
        env: this host's environment; HOME and DS_ENV_FILE of it say where the file is looked for.
        cwd: the working directory.

    Raises:
        LaunchError: `launch-env-file`, with each line that is wrong.
    """
    chosen = {name: env[name] for name in sorted(env) if name.startswith(PREFIXES) and not name.startswith(_OURS)}
    name = env.get("DS_ENV_FILE") or _FILE
    paths = dict.fromkeys(os.path.join(folder, name) for folder in (env.get("HOME", ""), cwd) if folder)
    problems: list[Problem] = []
    for path in map(Path, paths):
        if path.is_file():
            chosen |= _lines(path, problems)
    if problems:
        raise LaunchError.of(problems)
    return chosen


def _lines(path: Path, problems: list[Problem]) -> dict[str, str]:
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not name.strip().isidentifier():
            why = "expected: NAME=VALUE; the line is not shown, as it may hold a secret"
            problems.append(Problem("launch-env-file", f"{path}:{number} sets no variable.", why, "mend that line"))
            continue
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name.strip()] = value[1:-1] if quoted else value
    return found
