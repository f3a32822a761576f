"""`CallCheck` is debug mode: before each operation, the ranks compare over the store what they are about to do.

    check         each rank posts (operation, detail, call site) under the next number, and waits for the posts of all others
                  all equal                   it returns
                  not all equal               `collective-diverged` on every rank, because each sees the same posts
                  a rank has ended or is late `collective-missing` on every rank: the first rank that notices writes the
                                              error into the store, and the watcher of each other rank finds it there
    the watcher   interrupts the main thread. If that is in a call that cannot be interrupted (a collective of gloo or NCCL),
                  it prints its stack and ends the process

Everything goes over the store and not over the backend, because a collective that hangs cannot report it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from paceline.base.errors import CollectiveError
from paceline.world import rendezvous
from paceline_lens.hangs.progress import Look, Progress
from paceline_lens.hangs.threads import call_site
from paceline_lens.hangs.watcher import Watcher, duty, end_process, running

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_POLL_S = 0.02  # between two looks of a rank that waits for another
_LOOK_S = 0.25  # between two looks of the thread for an error
_LINGER_S = 2.0  # how long rank 0 waits for the others at the end, because the store may end with it
_GRACE_S = 5.0  # how long the main thread may take to be interrupted
_SIGNAL = getattr(signal, "SIGURG", None)  # ignored if a process has no handler for it; Windows does not have it

_numbers = itertools.count()
_dist: Any = dist  # torch's stubs lack its stores


class CallCheck:
    """Checks that all ranks of a group enter the same operation, from the same line of the script.

    Args:
        group: the ranks that are compared.
        timeout_s: seconds after which an absent rank counts as missing; by default the timeout of the group.
        computes_on_cpu: whether a busy thread computes.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None, computes_on_cpu: bool) -> None:
        session = duty(ErrorOfRanks)
        if session is None:
            watcher = running(computes_on_cpu)
            session = ErrorOfRanks(watcher)
            watcher.add(session)
        self.session = session
        self.timeout_s = rendezvous.timeout(timeout_s)
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.prefix = f"{next(self.session.checks)}/{self.ranks[0]}"
        self.seq = 0
        self.last: dict[int, dict[str, str]] = {}

    def check(self, op: str, detail: str = "") -> None:
        """Waits for the other ranks, and compares their posts with that of this rank.

        Raises:
            CollectiveError: `collective-diverged`, if operation, detail or call site differ; `collective-missing`, if a rank
                has ended or does not come in time.
        """
        session = self.session
        mine = {"op": op, "detail": detail, **vars(call_site())}
        self.seq += 1
        keys = {rank: f"{self.prefix}/{self.seq}/{rank}" for rank in self.ranks}
        try:
            session.store.set(keys[session.rank], json.dumps(mine))
            self._wait(keys, mine)
            self.last = {rank: json.loads(session.store.get(key)) for rank, key in keys.items()}
            # All ranks are here, so each has read the posts of two checks ago.
            if self.seq > 2:
                session.store.delete_key(f"{self.prefix}/{self.seq - 2}/{session.rank}")
            if len({(post["op"], post["detail"], post["key"]) for post in self.last.values()}) > 1:
                session.fail(_diverged(self.last))
        except CollectiveError:
            raise
        except RuntimeError as error:
            # An error of the store: rank 0 has ended, and the store with it.
            session.raised = True
            if session.word is not None:
                raise session.word from None
            raise _missing({0: "has ended, and the store with it"}, mine, self.last) from error

    def _wait(self, keys: dict[int, str], mine: dict[str, str]) -> None:
        """Waits until all keys are there. It fails as soon as a missing rank has ended, or at the timeout."""
        store = self.session.store
        started = time.monotonic()
        pause = _POLL_S / 100
        while not store.check(list(keys.values())):
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
            waited = time.monotonic() - started
            self.session.raise_word()
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            ended = {}
            for rank in absent:
                why = self.session.ending(rank)
                # It may have posted its key just before it ended, so the key is looked for once more.
                if why and not store.check([keys[rank]]):
                    ended[rank] = why
            if ended:
                self.session.fail(_missing(ended, mine, self.last))
            if absent and waited > self.timeout_s:
                late = dict.fromkeys(absent, f"did not come within {self.timeout_s:g} s")
                self.session.fail(_missing(late, mine, self.last))


class ErrorOfRanks:
    """Is the duty that raises in this process an error that any rank has found. All checks of a process share it.

    Args:
        watcher: the watcher of this process.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.look_s = _LOOK_S
        self.name = f"debug/{next(_numbers)}"
        self.store = rendezvous.part(self.name)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.checks = itertools.count()
        self.raised = False  # whether the main thread has raised the error
        self.word: CollectiveError | None = None
        self._watcher = watcher
        self._hearing = threading.Lock()
        self._handler: Any = None
        self._main = threading.main_thread()
        if _SIGNAL is not None and threading.current_thread() is self._main:
            self._handler = signal.signal(_SIGNAL, self._interrupted)
        # Set once the main thread has been interrupted: when the process ends, unless it has raised the error.
        self._ends_at = 0.0

    def fail(self, error: CollectiveError) -> None:
        """Writes an error into the store for all ranks, unless another rank was first. It raises the error that is there."""
        problem = error.problems[0]
        text = json.dumps([problem.code, problem.what, problem.why, problem.fix])
        self.store.compare_set("word", "", text)
        self.raise_word()

    def raise_word(self) -> None:
        """Raises the error that a rank has written, if there is one."""
        with self._hearing:
            if self.raised or not self._hear(self.store):
                return
            self.raised = True
        assert self.word is not None
        raise self.word

    def ending(self, rank: int, store: Store | None = None) -> str:
        """Returns how a rank has ended; "" while it runs."""
        store = store or self.store
        key = f"ended/{rank}"
        return bytes(store.get(key)).decode() if store.check([key]) else ""

    def look(self, look: Look, progress: Progress) -> None:
        """Looks for an error, and interrupts the main thread to raise it."""
        if self.raised:
            return
        # If the store ends, the main thread finds out at its next request.
        with contextlib.suppress(RuntimeError), self._hearing:
            store = self._watcher.store()
            if store is not None:
                self._hear(_dist.PrefixStore(self.name, store))
        if self.word is None or self.raised:
            return
        if not self._ends_at:
            self._ends_at = look.at + _GRACE_S
            if _SIGNAL is not None and self._handler is not None and self._main.ident is not None:
                signal.pthread_kill(self._main.ident, _SIGNAL)
        elif look.at > self._ends_at:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            end_process(
                f"rank {self.rank} is in a call that cannot be interrupted, and ends here:\n"
                f"paceline.CollectiveError: {self.word}"
            )

    def close(self, why: str) -> None:
        """Marks this rank as ended."""
        if self._handler is not None and threading.current_thread() is self._main:
            signal.signal(cast(signal.Signals, _SIGNAL), self._handler)
        if self.word is None:
            # If the store has already ended, rank 0 has ended too, and no rank needs to know.
            with contextlib.suppress(RuntimeError):
                self.store.set(f"ended/{self.rank}", why)
                self._linger(self.store)

    def _hear(self, store: Store) -> bool:
        """Returns whether a rank has written an error. If so, this rank writes that it has read it."""
        if self.word is None:
            if not store.check(["word"]):
                return False
            word = CollectiveError(*json.loads(store.get("word")))
            store.set(f"heard/{self.rank}", "1")
            self.word = word
            self._linger(store)
        return True

    def _linger(self, store: Store) -> None:
        """Lets rank 0 wait until all others have read the error, or have ended."""
        until = time.monotonic() + _LINGER_S
        while self.rank == 0 and time.monotonic() < until:
            unaware = [rank for rank in range(1, self.size) if not store.check([f"heard/{rank}"])]
            if all(self.ending(rank, store) for rank in unaware):
                break
            time.sleep(_POLL_S)

    def _interrupted(self, *_: object) -> None:
        """Handles the signal: it raises the error in the main thread."""
        if self.word is not None and not self.raised:
            self.raised = True
            raise self.word


def suggestion() -> str:
    """Returns an addition to the fix of a failed collective: to use debug mode, unless it is on."""
    if duty(ErrorOfRanks) is not None:
        return ""
    return "; with `--debug` (PACELINE_DEBUG=1) the error names the line of each rank"


def _in_words(post: dict[str, str]) -> str:
    detail = f" ({post['detail']})" if post["detail"] else ""
    return f"{post['op']}{detail} at {post['where']}"


def _diverged(posts: dict[int, dict[str, str]]) -> CollectiveError:
    ranks_by_call: dict[str, list[int]] = {}
    for rank, post in posts.items():
        ranks_by_call.setdefault(_in_words(post), []).append(rank)
    if len({(post["op"], post["key"]) for post in posts.values()}) == 1:
        what = f"the ranks pass different data to {posts[min(posts)]['op']}."
        fix = "give all ranks the same structure, dtypes and shapes; gather_object takes anything"
    else:
        what = "the ranks are not at the same place of the script."
        fix = "let every rank make the same calls: take them out of what only some ranks run, such as a block under "
        fix += "`if is_main_process` or a loop of unequal length"
    why = [f"rank {', '.join(map(str, ranks))}: {call}" for call, ranks in ranks_by_call.items()]
    return CollectiveError("collective-diverged", what, why=why, fix=fix)


def _missing(absent: dict[int, str], mine: dict[str, str], last: dict[int, dict[str, str]]) -> CollectiveError:
    names = ", ".join(map(str, absent))
    why = [f"the others wait in {_in_words(mine)}"]
    for rank, reason in absent.items():
        seen = f"it was last seen in {_in_words(last[rank])}" if rank in last else "it has not entered any operation"
        why.append(f"rank {rank} {reason}; {seen}")
    return CollectiveError(
        "collective-missing",
        f"rank {names} never entered {mine['op']}.",
        why=why,
        fix="let every rank make this call, the same number of times; if the rank is only slow, raise timeout_s",
    )
