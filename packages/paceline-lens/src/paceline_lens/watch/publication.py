"""`Publication` sends the snapshot of a run to pages: everything at first, then only what has changed. `server.py` uses it.

A snapshot is divided into parts. A part is an entry of the snapshot or, if the entry is a dictionary, one of its entries. Each
part has the version at which it last changed. A page says which version it has, and gets the parts that are newer. So nothing
is stored for a page, however slow it is, and however long it is disconnected.
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
from paceline_lens.watch.view import FIRST_NAMES

Path = tuple[str, ...]

MOST_NAMES = 64  # names whose series one page may choose


@dataclass(frozen=True)
class _PagePart:
    """A part of the snapshot as JSON, and the version at which it last changed."""

    text: str
    version: int


@dataclass(frozen=True)
class Update:
    """A message to a page.

    Attributes:
        id: the version that the page has with this update; the page sends it when it asks for the next update.
        whole: whether the page discards what it had before.
        data: a JSON list of [path, value].
    """

    id: str
    whole: bool
    data: str


class Publication:
    """Holds the latest snapshot of a run, and when each part of it last changed. Any thread may call it.

    Args:
        snapshot: returns the snapshot in types of JSON, with the series of the given names; None stands for the first
            `FIRST_NAMES` names, which a page shows if it has not chosen any.
        interval_s: the shortest time between two snapshots. A snapshot is only made when a page asks.
        largest_share: the largest share of one core that snapshots may take. So those of a large run are made less often.
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
        self._parts: dict[Path, _PagePart] = {}
        self._newest = 0
        # The first word of each id. A page with the id of another process, or of a time before a part was removed, gets
        # everything again.
        self._epoch = secrets.token_hex(4)
        self._next_refresh = 0.0
        self._first_names: list[str] = []
        self._choices: Counter[tuple[str, ...]] = Counter()  # names -> pages that have chosen them; () for none

    @contextmanager
    def page(self, names: Iterable[str] = ()) -> Iterator[Callable[[str], Update | None]]:
        """Is open as long as a page is.

        Args:
            names: the names whose series the page shows; empty for the first names.

        Yields:
            A function that takes the id of the page's last update ("" for none), and returns the next update; None if
            nothing has changed.
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
                self._choices += Counter()  # this addition removes choices whose count is 0

    @property
    def pages(self) -> int:
        """The number of open pages."""
        with self._lock:
            return self._choices.total()

    def _since(self, seen: str, choice: tuple[str, ...]) -> Update | None:
        with self._lock:
            self._refresh()
            version = self._version_of(seen)
            shown_names = set(choice or self._first_names)
            changed = []
            for path, part in self._parts.items():
                is_shown = path[0] != "series" or path[-1] in shown_names
                if part.version > version and is_shown:
                    changed.append(f"[{json.dumps(path)},{part.text}]")
            if version >= 0 and not changed:
                return None
            data = f"[{','.join(changed)}]"
            return Update(f"{self._epoch}-{self._newest}", whole=version < 0, data=data)

    def _version_of(self, seen: str) -> int:
        """Returns the version that a page has; -1 if it must get everything again."""
        epoch, _, number = seen.partition("-")
        if epoch != self._epoch or not number.isdecimal() or len(number) > 18:
            return -1
        return int(number)

    def _refresh(self) -> None:
        """Makes a new snapshot if it is time for one, and finds the parts that have changed."""
        began = time.monotonic()
        if began < self._next_refresh:
            return
        texts = self._new_texts()
        gone = self._parts.keys() - texts.keys()
        if any(path[0] != "series" for path in gone):
            # A part was removed, which an update cannot say: every page gets everything again. A series is an exception: it
            # is removed only when no page shows it.
            self._epoch = secrets.token_hex(4)
            self._parts.clear()
        self._newest += 1
        parts = {}
        for path, text in texts.items():
            part = self._parts.get(path)
            if part is None or part.text != text:
                part = _PagePart(text, self._newest)
            parts[path] = part
        self._parts = parts
        ended = time.monotonic()
        self._next_refresh = began + max(self.interval_s * 0.9, (ended - began) / self._largest_share)

    def _new_texts(self) -> dict[Path, str]:
        """Returns the parts of a new snapshot. If that fails, pages keep what they have, and show the error in `fault`."""
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
        """Returns the names whose series some page shows; None for the first names, if they are not known yet."""
        chosen = list(chain.from_iterable(self._choices))
        if () not in self._choices:
            return chosen
        if not self._first_names:
            return None
        return [*self._first_names, *chosen]


def _parts_of(snapshot: Mapping[str, Any]) -> dict[Path, str]:
    """Returns the JSON of each part by its path. An empty dictionary is a single part."""
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
