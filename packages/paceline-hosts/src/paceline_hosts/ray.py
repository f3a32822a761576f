"""Calls a function on all ranks of a Ray cluster, from a driver or a notebook.

The function is packed by cloudpickle. Each rank runs `python -m paceline_hosts.ray` as it would run a script; this module
unpacks the function there, calls it, and writes its value for the driver.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch.worker.pickling import call_packed, pack, pickled
from paceline_hosts.hosts import job_on_hosts
from paceline_hosts.launchers.ray.handle import RayHandle
from paceline_hosts.launchers.ray.node import FOLDER, FUNCTION, VALUE

_MODULE = "paceline_hosts.ray"


def run(
    function: Callable[..., Any], args: Sequence[Any] = (), *, procs: int = 1, nodes: int | str = 1, **settings: Any
) -> list[Any]:
    """Calls a function on all ranks of a Ray cluster, and returns what it returned on each.

    The function may be defined in a notebook. What the ranks print appears here. A driver that is connected to a cluster
    (`ray.init`) stays connected.

    Args:
        function: what to run; it makes its own `Accelerator`.
        args: its arguments.
        procs: processes on each host.
        nodes: hosts, or a range such as "1:2".
        settings: further settings of `paceline launch` by their names, such as `ray_gpus=1` or `max_restarts=2`.

    Returns:
        The values in the order of the ranks.

    Raises:
        LaunchError: `rank-failed` after the report of the rank that failed; `launch-pickle`, `launch-accelerator`, and those
            of `paceline launch --on ray`.
        ConfigError: as `paceline launch`.
    """
    given_settings = {"launcher": "ray", "procs": procs, "nodes": nodes, "module": True, **settings}
    given = [Given(name, value, "command line", f"run({name}=...)") for name, value in given_settings.items()]
    job = job_on_hosts(resolve_launch(given), _MODULE, (), environment.snapshot())
    handle = RayHandle(job, pack(partial(function, *args)))
    outcome = handle.wait()
    if outcome.exit_code == 130:
        raise KeyboardInterrupt
    if outcome.exit_code:
        name = getattr(function, "__qualname__", type(function).__name__)
        what = f"{name} failed on the Ray cluster with exit code {outcome.exit_code}."
        raise LaunchError(
            "rank-failed", what, "the rank that failed first is named above", "correct the error that is shown there"
        )
    return [pickle.loads(value) for value in handle.values]


def main() -> None:
    """Calls the function in each rank, and writes its value for the driver."""
    folder = environment.snapshot()[FOLDER]
    value = call_packed(str(Path(folder, FUNCTION)), "")
    path = Path(folder, f"{VALUE}{environment.get('RANK')}")
    path.write_bytes(pickled(value, "what the function returned"))


if __name__ == "__main__":
    main()
