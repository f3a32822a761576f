"""`Publication`: what is shown of a run, as pages are told it: everything once, then what has changed.

A snapshot is divided into parts: an entry of the snapshot or, where the entry is a dictionary, each of its entries. Each part
remembers the version at which it last changed. A page says which version it has seen and is sent the parts that are newer;
so nothing is kept for a page, however slow it is and however long it is away.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from paceline.base.log import logger

Path = tuple[str, ...]

FIRST_NAMES = 24
MOST_NAMES = 64  # that one page may choose


@dataclass
class _Part:
    text: str
    version: int


@dataclass(frozen=True)
class Update:
    """What a page is sent.

    Attributes:
        id: of the state that the page has with it; it says this again when it asks for the next one.
        whole: whether the page forgets what it had before.
        data: JSON, a list of [path, value].
    """

    id: str
    whole: bool
    data: str


class Publication:
    """The latest snapshot of a run, and when each part of it last changed. Any thread may call it.

    Args:
        snapshot: makes the snapshot, in words of JSON, with the series of the given names. None stands for the first
            `FIRST_NAMES`: those that a page shows that has not chosen any.
        interval_s: the snapshot is made at most this often, and only when a page asks.
        largest_share: of one core that making snapshots may take; those of a large run are made less often.
    """

    def __init__(
        self,
        snapshot: Callable[[Sequence[str] | None], Mapping[str, Any]],
        interval_s: float = 1.0,
        largest_share: float = 0.1,
    ) -> None:
        self.interval_s = interval_s
        self._snapshot = snapshot
        self._largest_share = largest_share
        self._lock = threading.Lock()
        self._parts: dict[Path, _Part] = {}
        self._newest = 0
        # A page that has seen a version of another life starts anew.
        self._life = secrets.token_hex(4)
        self._next_refresh = 0.0
        self._first_names: list[str] = []
        self._choices: Counter[tuple[str, ...]] = Counter()  # names -> pages that have chosen them; () for none

    @contextmanager
    def page(self, names: Iterable[str] = ()) -> Iterator[Callable[[str], Update | None]]:
        """A page that is open, with the names whose series it shows.

        Yields:
            What is new for the page that has seen the state of this id ("" for none); None where nothing is.
        """
        choice = tuple(dict.fromkeys(names))[:MOST_NAMES]
        with self._lock:
            self._choices[choice] += 1
            self._next_refresh = 0.0
        try:
            yield lambda seen: self._since(seen, choice)
        finally:
            with self._lock:
                self._choices[choice] -= 1
                self._choices += Counter()  # choices of no page go

    @property
    def pages(self) -> int:
        """How many pages are open."""
        with self._lock:
            return self._choices.total()

    def _since(self, seen: str, choice: tuple[str, ...]) -> Update | None:
        with self._lock:
            self._refresh()
            version = self._version_of(seen)
            shown = set(choice or self._first_names)
            changed = []
            for path, part in self._parts.items():
                is_shown = path[0] != "series" or path[-1] in shown
                if part.version > version and is_shown:
                    changed.append(f"[{json.dumps(path)},{part.text}]")
            if version >= 0 and not changed:
                return None
            return Update(f"{self._life}-{self._newest}", version < 0, f"[{','.join(changed)}]")

    def _version_of(self, seen: str) -> int:
        """The version that a page has; -1 where it must start anew."""
        life, _, number = seen.partition("-")
        if life != self._life or not number.isdecimal() or len(number) > 18:
            return -1
        return int(number)

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._next_refresh:
            return
        texts = self._new_texts()
        gone = self._parts.keys() - texts.keys()
        if any(path[0] != "series" for path in gone):
            # A part has gone: rather than to say which, everything is sent anew. A series goes when no page shows it.
            self._life = secrets.token_hex(4)
            self._parts.clear()
        self._newest += 1
        parts = {}
        for path, text in texts.items():
            part = self._parts.get(path)
            if part is None or part.text != text:
                part = _Part(text, self._newest)
            parts[path] = part
        self._parts = parts
        ended = time.monotonic()
        self._next_refresh = began + max(self.interval_s * 0.9, (ended - began) / self._largest_share)

    def _new_texts(self) -> dict[Path, str]:
        """The parts of a new snapshot. Where it fails, the page keeps what it has, and says that it is old."""
        try:
            snapshot = self._snapshot(self._asked())
            self._first_names = list(snapshot.get("names", ())[:FIRST_NAMES])
            return _parts_of({**snapshot, "fault": ""})
        except Exception as error:
            texts = {path: part.text for path, part in self._parts.items()}
            message = _json(f"{type(error).__name__}: {error}")
            if texts.get(("fault",)) != message:
                logger("watch").error("the page cannot be brought up to date", exc_info=True)
            texts["fault",] = message
            return texts

    def _asked(self) -> list[str] | None:
        """Names whose series some page shows."""
        chosen = list(chain.from_iterable(self._choices))
        if () not in self._choices:
            return chosen
        # Before the first snapshot nobody knows the first names: None asks for them.
        return [*self._first_names, *chosen] if self._first_names else None


def _parts_of(snapshot: Mapping[str, Any]) -> dict[Path, str]:
    """Path -> JSON of each part. An empty dictionary is a part of its own."""
    texts: dict[Path, str] = {}
    for name, value in snapshot.items():
        if not isinstance(value, Mapping) or not value:
            texts[name,] = _json(value)
            continue
        for key, entry in value.items():
            texts[name, str(key)] = _json(entry)
    return texts


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
