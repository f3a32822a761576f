"""Each phase of a save or a load ends on all ranks with the same results, or with the same error.

If an error left a phase on one rank only, the others would wait for this rank in the next collective. So an error in the
local work of a phase is caught, the ranks exchange their problems, and then all of them raise the same error.
"""

from __future__ import annotations

import errno
import hashlib
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from paceline.base.errors import CheckpointError, PacelineError, Problem

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST}


class WriterPeers(Protocol):
    """The part of `world.collectives.Collectives` that checkpoints need."""

    rank: int
    size: int

    def gather_object(self, obj: object) -> list[Any]:
        """Returns the objects of all ranks, in rank order, on every rank."""

    def collect_object(self, obj: object) -> list[Any]:
        """Returns the objects of all ranks, in rank order, on rank 0; an empty list on the others."""

    def scatter_object(self, objs: Sequence[Any]) -> Any:
        """Returns this rank's entry of the list that rank 0 passes."""

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""

    def apart(self) -> WriterPeers:
        """Returns the same ranks with a process group of their own, for a background thread."""


@dataclass
class Alone:
    """The `WriterPeers` of a single process: a script that reads a checkpoint, a command, a rank whose others do not call."""

    rank: int = 0
    size: int = 1

    def gather_object(self, obj: object) -> list[Any]:
        return [obj]

    def collect_object(self, obj: object) -> list[Any]:
        return [obj]

    def scatter_object(self, objs: Sequence[Any]) -> Any:
        return objs[0]

    def any(self, flag: bool) -> bool:
        return flag

    def apart(self) -> Alone:
        return self


def together(peers: WriterPeers, doing: str, work: Callable[[], T]) -> list[T]:
    """Runs `work` on each rank, and returns the results of all ranks, in rank order, on every rank.

    Args:
        peers: the ranks that call this together.
        doing: a description for errors, such as "writing the shards".
        work: local work without collectives.

    Ranks: all must call; one `gather_object`.

    Raises:
        CheckpointError: on every rank, with the problems of all ranks, if `work` failed on any.
    """
    value, failure, problems = _attempt(doing, work, peers.rank)
    outcomes = peers.gather_object((value, problems))
    _raise_all([problems_of_rank for _, problems_of_rank in outcomes], failure)
    return [value_of_rank for value_of_rank, _ in outcomes]


def agreed(peers: WriterPeers, doing: str, work: Callable[[], T]) -> T:
    """As `together`, but returns the result of this rank only, which is not sent. Ranks: all; one `any`."""
    value, failure, problems = _attempt(doing, work, peers.rank)
    # Problems are only gathered if there are some: with thousands of ranks, that many empty messages take time.
    if peers.any(bool(problems)):
        _raise_all(peers.gather_object(problems), failure)
    return cast(T, value)


def collected(peers: WriterPeers, doing: str, work: Callable[[], T]) -> list[T]:
    """As `together`, but only rank 0 gets the results; the other ranks get an empty list. Ranks: all."""
    return cast("list[T]", peers.collect_object(agreed(peers, doing, work)))


def raise_alike(peers: WriterPeers, doing: str, failure: Exception | None) -> None:
    """Raises on every rank an error that any rank has caught before. Ranks: all must call; one `gather_object`."""
    problems = () if failure is None else _problems(failure, doing, peers.rank)
    _raise_all(peers.gather_object(problems), failure)


def _attempt(doing: str, work: Callable[[], T], rank: int) -> tuple[T | None, Exception | None, tuple[Problem, ...]]:
    try:
        return work(), None, ()
    except Exception as error:  # it is sent to all ranks, and raised on each of them
        return None, error, _problems(error, doing, rank)


def _raise_all(ranks: list[tuple[Problem, ...]], failure: Exception | None) -> None:
    # Problems cannot be hashed: their reasons may be lists.
    distinct_problems: list[Problem] = []
    for problems in ranks:
        distinct_problems += [problem for problem in problems if problem not in distinct_problems]
    if distinct_problems:
        # Its problems are among these, so that Python would print the same words twice.
        cause = None if isinstance(failure, PacelineError) else failure
        raise CheckpointError.of(distinct_problems) from cause


def distinct(peers: WriterPeers, tree: object) -> list[Any]:
    """Returns the distinct values of `tree` among the ranks, lowest rank first; equal values are sent once.

    Ranks: all must call; two `gather_object`s.
    """
    # Equal values of several ranks are the same object in the result of `shared_among`.
    by_id = {id(value): value for value in shared_among(peers, tree)}
    return list(by_id.values())


def shared_among(peers: WriterPeers, tree: object) -> list[Any]:
    """Returns the JSON value of each rank, in rank order; equal values are sent once.

    Ranks: all must call; two `gather_object`s.
    """
    digest_of_rank = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    digests = peers.gather_object(digest_of_rank)
    # Of the ranks with equal values only the lowest sends its value; the others take it from there.
    first = digests.index(digests[peers.rank]) == peers.rank
    trees = peers.gather_object(tree if first else None)
    return [trees[digests.index(digest)] for digest in digests]


def _problems(error: Exception, doing: str, rank: int) -> tuple[Problem, ...]:
    if isinstance(error, PacelineError):
        return error.problems
    refused = refusal(error)
    if refused is not None:
        return (os_problem(refused, doing),)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        Problem(
            "checkpoint-failed",
            f"rank {rank} failed while {doing}: {type(error).__name__}: {error}",
            why=f"raised at {where.filename}:{where.lineno} in {where.name}",
            fix="correct the named cause; earlier checkpoints are untouched",
        ),
    )


def refusal(error: BaseException | None) -> OSError | None:
    """Returns the OSError behind an error: `torch.save` raises an error of its own after it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def os_problem(error: OSError, doing: str) -> Problem:
    """Returns an error of the operating system as a problem with a fix."""
    place = ""
    if error.filename:
        # `doing` may end with the folder: the file is then named within it.
        folder = doing.rpartition(" ")[2]
        place = f" ({str(error.filename).removeprefix(f'{folder}/')})"
    why = f"the operating system reports: {error.strerror}"
    if error.errno in _FULL:
        what = f"the disk is full: {doing}{place} stopped."
        fix = "make room, or save to another disk; checkpoints that were saved before are untouched"
        return Problem("checkpoint-disk-full", what, why, fix)
    if error.errno in _NO_FOLDER:
        what = f"{doing}{place} failed: a file has the name of the folder, or of one above it."
        return Problem("checkpoint-not-writable", what, why, "choose another folder")
    if error.errno in _FORBIDDEN:
        what = f"no permission: {doing}{place} was refused."
        return Problem("checkpoint-not-writable", what, why, "choose a folder that this user may write to and read")
    return Problem(
        "checkpoint-io",
        f"{doing}{place} failed.",
        why=f"the operating system reports: {error}",
        fix="check that the path exists on every host and that its disk answers",
    )
