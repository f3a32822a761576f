"""Debug mode: explains hangs. Ranks compare what they are about to do before they do it, over the store.

    Watch.check   each rank posts (operation, detail, call site) under the next number, and waits for all others
                  all there, all equal        go on
                  all there, not equal        `collective-diverged` on every rank: each sees the same posts
                  one has ended, or is late   `collective-missing` on every rank: the first to know leaves word
                                              in the store, and a thread of each other rank finds it there
    the thread    interrupts the main thread wherever it is; one that sits in a call which cannot be interrupted
                  (a collective of gloo or NCCL) is ended, its stack printed

The store is asked and never the backend: a collective that is stuck cannot report that it is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import Any, cast

import torch.distributed as dist

from paceline.base.errors import CollectiveError
from paceline.world import rendezvous
from paceline.world.places import call_site

_POLL_S = 0.02  # of a rank that waits for another
_LOOK_S = 0.25  # of the thread that looks for word of a failure
_LINGER_S = 2.0  # how long rank 0, with which the store may vanish, stays for the others
_GRACE_S = 5.0  # how long the main thread may take to be interrupted
_SIGNAL = getattr(signal, "SIGURG", None)  # harmless where nobody handles it; unknown on Windows

_numbers = itertools.count()


class Watch:
    """Checks that all ranks of a group enter the same operation, from the same line of the script.

    Args:
        group: the ranks that are compared.
        timeout_s: seconds until a rank that does not come counts as missing; by default the group's.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        session = rendezvous.companion_of(_Session)
        if session is None:
            session = _Session()
            rendezvous.accompany(session)
        self.session = session
        self.timeout_s = rendezvous.timeout(timeout_s)
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.prefix = f"{next(self.session.watches)}/{self.ranks[0]}"
        self.seq = 0
        self.last: dict[int, dict[str, str]] = {}

    def check(self, op: str, detail: str = "") -> None:
        """Waits for the other ranks and compares.

        Raises:
            CollectiveError: `collective-diverged` where operation, detail or call site differ; `collective-missing`
                where a rank has ended or does not come in time.
        """
        session = self.session
        mine = {"op": op, "detail": detail, **vars(call_site())}
        self.seq += 1
        keys = {rank: f"{self.prefix}/{self.seq}/{rank}" for rank in self.ranks}
        try:
            session.store.set(keys[session.rank], json.dumps(mine))
            self._wait(keys, mine)
            self.last = {rank: json.loads(session.store.get(key)) for rank, key in keys.items()}
            if self.seq > 2:  # whoever is here has read what was posted two checks ago
                session.store.delete_key(f"{self.prefix}/{self.seq - 2}/{session.rank}")
            if len({(post["op"], post["detail"], post["key"]) for post in self.last.values()}) > 1:
                session.fail(_diverged(self.last))
        except CollectiveError:
            raise
        except RuntimeError as error:  # torch's DistError family: rank 0 is gone, and the store with it
            session.raised = True
            if session.word is not None:
                raise session.word from None
            raise _missing({0: "has ended, and the store with it"}, mine, self.last) from error

    def _wait(self, keys: dict[int, str], mine: dict[str, str]) -> None:
        """Until all keys are there; fails as soon as a rank that is missing has ended, or at the timeout."""
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
                # Of a rank that has ended, all it ever posted is there: look once more.
                if why and not store.check([keys[rank]]):
                    ended[rank] = why
            if ended:
                self.session.fail(_missing(ended, mine, self.last))
            if absent and waited > self.timeout_s:
                late = dict.fromkeys(absent, f"did not come within {self.timeout_s:g} s")
                self.session.fail(_missing(late, mine, self.last))


class _Session:
    """What the watches of this process share, from joining a group to leaving it: word of a failure, and the thread."""

    def __init__(self) -> None:
        self.store = rendezvous.part(f"watch/{next(_numbers)}")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.watches = itertools.count()
        self.raised = False  # whether the main thread knows
        self.word: CollectiveError | None = None
        self._hearing = threading.Lock()
        self._stop = threading.Event()
        self._handler: Any = None
        self._main = threading.main_thread()
        if _SIGNAL is not None and threading.current_thread() is self._main:
            self._handler = signal.signal(_SIGNAL, self._interrupted)
        self._thread = threading.Thread(target=self._look, name="paceline-watch", daemon=True)
        self._thread.start()

    def fail(self, error: CollectiveError) -> None:
        """Leaves word of `error` for all ranks, unless another did so first, and raises whichever it is."""
        problem = error.problems[0]
        text = json.dumps([problem.code, problem.what, problem.why, problem.fix])
        self.store.compare_set("word", "", text)
        self.raise_word()

    def raise_word(self) -> None:
        """Raises what some rank has left word of."""
        with self._hearing:
            if self.raised or not self._hear():
                return
            self.raised = True
        assert self.word is not None
        raise self.word

    def ending(self, rank: int) -> str:
        """How `rank` ended; "" while it runs."""
        key = f"ended/{rank}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""

    def close(self, why: str) -> None:
        """Marks this rank as ended, and ends the thread."""
        self._stop.set()
        self._thread.join(_LINGER_S + _LOOK_S)
        if self._handler is not None and threading.current_thread() is self._main:
            signal.signal(cast(signal.Signals, _SIGNAL), self._handler)
        if self.word is None:
            # Where the store has ended before us, rank 0 is gone and nobody is left to read.
            with contextlib.suppress(RuntimeError):
                self.store.set(f"ended/{self.rank}", why)
                self._linger()

    def _hear(self) -> bool:
        """Whether there is word of a failure; if so, says that it was heard."""
        if self.word is None:
            if not self.store.check(["word"]):
                return False
            word = CollectiveError(*json.loads(self.store.get("word")))
            self.store.set(f"heard/{self.rank}", "1")
            self.word = word
            self._linger()
        return True

    def _linger(self) -> None:
        """Lets rank 0 wait until all others have heard of a failure, or have ended."""
        until = time.monotonic() + _LINGER_S
        while self.rank == 0 and time.monotonic() < until:
            deaf = [rank for rank in range(1, self.size) if not self.store.check([f"heard/{rank}"])]
            if all(self.ending(rank) for rank in deaf):
                break
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """The thread: looks for word, and brings it to the main thread."""
        try:
            while not self._stop.wait(_LOOK_S):
                with self._hearing:
                    if self._hear():
                        break
        except RuntimeError:
            return  # the store is gone; the main thread finds out when it asks
        if self._stop.is_set() or self.raised:
            return
        if _SIGNAL is not None and self._handler is not None and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, _SIGNAL)
        until = time.monotonic() + _GRACE_S
        while not self.raised and not self._stop.wait(_POLL_S):
            if time.monotonic() > until:
                self._end_process()

    def _interrupted(self, *_: object) -> None:
        """Runs in the main thread, wherever it is."""
        if self.word is not None and not self.raised:
            self.raised = True
            raise self.word

    def _end_process(self) -> None:
        sys.stderr.write(
            f"rank {self.rank} sits in a call that cannot be interrupted, and ends here:\n"
            f"paceline.CollectiveError: {self.word}\n"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        os._exit(1)


def suggestion() -> str:
    """What to add to the fix of a failed collective: debug mode, unless it is on."""
    if rendezvous.companion_of(_Session) is not None:
        return ""
    return "; with `--debug` (PACELINE_DEBUG=1) the line is named at which each rank is"


def _in_words(post: dict[str, str]) -> str:
    detail = f" ({post['detail']})" if post["detail"] else ""
    return f"{post['op']}{detail} at {post['where']}"


def _diverged(posts: dict[int, dict[str, str]]) -> CollectiveError:
    ranks_by_call: dict[str, list[int]] = {}
    for rank, post in posts.items():
        ranks_by_call.setdefault(_in_words(post), []).append(rank)
    if len({(post["op"], post["key"]) for post in posts.values()}) == 1:
        what = f"the ranks bring different data to {posts[min(posts)]['op']}."
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
