"""Refuses a process that a rank has started, and that has inherited the variables of that rank.

Such a child would join the run as a second process of the same rank: rank 0's finds the port taken, and any other would answer
in its parent's place. So each rank that has joined signs in the store, and one that is about to join looks whether its own
parent, or a parent of that, has signed for its rank already.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING

from paceline.base.errors import WorldError
from paceline.base.process_name import process_fields

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_MOST_ANCESTORS = 50


def sign(store: Store, rank: int) -> None:
    """Notes in the store that this process is a rank of the run."""
    store.set(_key(rank), json.dumps([socket.gethostname(), os.getpid()]))


def refuse(store: Store, rank: int) -> None:
    """Refuses this process if a process that has started it is the same rank.

    Raises:
        WorldError: `world-child`.
    """
    if not store.check([_key(rank)]):
        return
    host, pid = json.loads(store.get(_key(rank)))
    # The entry of an earlier round may be that of a dead process, which is nobody's parent any more.
    if host == socket.gethostname() and pid in _ancestors():
        raise of(rank, pid)


def of(rank: int, parent: int) -> WorldError:
    """Returns the error of a process that inherited the rank of its parent."""
    return WorldError(
        "world-child",
        f"a process that rank {rank} has started cannot be rank {rank} too.",
        why=f"process {os.getpid()} constructs an `Accelerator`, and has inherited RANK={rank} and the other variables of "
        f"process {parent}, which has joined the run as this rank",
        fix="start it as a run of its own: `subprocess.run(command, env={**os.environ, 'RANK': '0', 'WORLD_SIZE': '1', "
        "'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'PACELINE_SETTINGS': ''})`. With multiprocessing, use the start method "
        "'spawn', and set these variables in the child first",
    )


def _key(rank: int) -> str:
    return f"process/{rank}"


def _ancestors() -> set[int]:
    """Returns the process ids of the parent of this process, of its parent, and so on; only the parent's outside of Linux."""
    ancestors = [os.getppid()]
    while len(ancestors) < _MOST_ANCESTORS:
        fields = process_fields(ancestors[-1])
        parent = int(fields[1]) if fields else 0
        if parent <= 1:
            break
        ancestors.append(parent)
    return set(ancestors)
