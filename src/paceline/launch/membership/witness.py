"""A store off the training hosts, as one launcher sees it: where a run is found, and who may go on where half of it is lost.

The store holds one record for a run. It is changed by compare-and-swap alone, so of two launchers only one is the first:

    find    no record: this launcher founds the run; else it asks at the places that the record names
    vote    half of a round's members may go on without the others, once the record says that one of them decides
    renew   the leader writes the places of all every two seconds; a record that nobody renews is free again

It has no sockets and no clock: `requests` are for the network, `on_answer` is what came of one. Each value is signed with the
run's secret, since whoever reaches the store may write there. docs/adr/0024-a-witness-off-the-hosts.md says why it is sound.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from paceline.base.json_fields import Between, read
from paceline.base.version import VERSION
from paceline.launch.membership.peers import NEVER
from paceline.launch.membership.rounds import Name, Place

RENEW_S = 2.0
STALE_S = (
    12.0  # a record that nobody has renewed for so long is of a run that is no more, if nobody of it answers either
)
ANSWER_S = 4.0  # the client gives up sooner
_LOOK_S = 1.0
_PLACES_AT_MOST = 64
_LONGEST = 1 << 16
_PURPOSE = b"paceline-store-1"

Number = Annotated[int, Between(0, 1_000_000_000)]


class Unsealed(ValueError):
    """A value in the store that no launcher with this run's secret has written."""


@dataclass(frozen=True)
class Record:
    """What the store holds for a run.

    Attributes:
        life: drawn by whoever founded the run. A store that has lost its memory, or serves another run by now, has another.
        number: of the round that `holder` may decide on with half of the members of the one before.
        holder: the launcher with that right.
        places: where launchers of the run can be asked.
        beat: counts the changes.
        host, version: of the launcher that founded the run.
    """

    life: Name
    number: Number
    holder: Name
    places: tuple[Place, ...]
    beat: Number = 0
    host: Name = ""
    version: Name = VERSION


@dataclass(frozen=True)
class Standing:
    """What a launcher that asks for the store's vote has had part in.

    Attributes:
        id: the launcher's.
        begun: the number of the last round that it began.
        next: that of the round that it would propose.
        accepted: the last proposal of another that it has accepted: its number, and who made it.
    """

    id: str
    begun: int
    next: int
    accepted: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Request:
    """One question to the store: its value, or a compare-and-swap of it.

    Attributes:
        key: its number.
        swaps: whether `new` is to be written where `old` stands.
        old, new: None for no value.
    """

    key: int
    swaps: bool = False
    old: str | None = None
    new: str | None = None


class Seal:
    """Signs what is written for one run, and knows it again.

    Args:
        secret: the run's.
        run: its name.
    """

    def __init__(self, secret: str, run: str) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE + b" " + run.encode(), "sha256")

    def close(self, record: Record) -> str:
        """A record as it is written."""
        text = json.dumps(asdict(record))
        return f"{self._tag(text)} {text}"

    def open(self, value: str) -> Record:
        """The record of a value.

        Raises:
            Unsealed: nobody with this secret has written it for this run.
        """
        tag, _, text = value[:_LONGEST].partition(" ")
        if not hmac.compare_digest(tag.encode(errors="replace"), self._tag(text).encode()):
            raise Unsealed("no launcher with this run's secret has written it")
        try:
            record: Record = read(Record, json.loads(text), "record")
        except RecursionError:
            raise Unsealed("it is nested too deeply") from None
        return record

    def _tag(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(errors="replace"), "sha256").hex()


class Witness:
    """The store, as one launcher sees it.

    Args:
        seal: of the run.
        host: this host's name.
        new_life: draws a name that no other record has.
        name: what to call the store in messages.
        now: seconds of a clock that only goes forward.

    Attributes:
        requests: for the network.
        record: as it was read last; None where there was none.
        life: of the record that this launcher read first. What another one says cannot be relied on: its store may have
            forgotten who had the right to go on.
        trouble: why the store is of no use at the moment; "" for nothing.
    """

    def __init__(self, seal: Seal, host: str, new_life: Callable[[], str], name: str, now: float) -> None:
        self.seal = seal
        self.host = host
        self.name = name
        self.requests: list[Request] = []
        self.record: Record | None = None
        self.life = ""
        self.trouble = ""
        self._new_life = new_life
        self._value: str | None = None
        self._is_foreign = False
        self._changed_at = now  # when the value was first seen as it is now
        self._read_at = NEVER
        self._renewed_at = NEVER
        self._pending: Request | None = None
        self._asked_at = NEVER
        self._next_key = 1
        self._has_asked_to_leave = False

    @property
    def places(self) -> tuple[Place, ...]:
        """Where launchers of the run can be asked, as far as the store says."""
        return self.record.places if self.record is not None else ()

    @property
    def why_not(self) -> str:
        """Why nobody gets a right from the store; "" where one can be had."""
        if self.trouble:
            return f"{self.name}: {self.trouble}"
        return f"{self.name} has lost what it knew of this run" if self.is_lost else ""

    @property
    def is_lost(self) -> bool:
        """Whether the store has forgotten this run, or serves another: it can give nobody the right to go on."""
        return bool(self.life) and self._read_at > NEVER and (self.record is None or self.record.life != self.life)

    def on_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """What came of a request: the value that the store has now, or why there was no answer."""
        if self._pending is None or self._pending.key != key:
            return  # it was given up; what it did is seen by the next one
        self._pending = None
        if trouble:
            self.trouble = trouble
            return
        # Nobody can renew a record while the store is away: the time begins anew.
        if self.trouble or value != self._value:
            self._changed_at = now
        self.trouble = ""
        self._read_at = now
        self._value = value
        self._is_foreign = False
        self.record = None
        if value:
            try:
                self.record = self.seal.open(value)
            except ValueError as error:
                self._is_foreign = True
                self.trouble = f"it holds something else for this run: {error}"
        if self.record is not None and not self.life:
            self.life = self.record.life

    # What a launcher wants

    def look(self, now: float) -> None:
        """Reads the record now and then."""
        if not self._is_busy(now) and now - self._asked_at >= _LOOK_S:
            self._ask(Request(self._key()), now)

    def found(self, me: str, place: Place, nobody_answers: bool, now: float) -> bool:
        """Tries to found the run where no other goes on; returns whether this launcher is the one that founds it.

        Args:
            me, place: this launcher.
            nobody_answers: whether each place that the record names was asked in vain.
            now: seconds.
        """
        self.look(now)
        if self._read_at == NEVER or self._is_foreign:
            return False
        record = self.record
        if record is not None and (record.holder, record.number) == (me, 0) and record.life == self.life:
            return True
        is_stale = nobody_answers and now - self._changed_at > STALE_S
        if (record is None or not record.places or is_stale) and not self.trouble and not self._is_busy(now):
            # This launcher was never a member of the run that the record was of.
            self.life = self._new_life()
            self._swap(Record(self.life, 0, me, (place,), host=self.host), now)
        elif record is not None and self._pending is None:
            self.life = record.life
        return False

    def vote(self, mine: Standing, now: float) -> bool | None:
        """Asks for the right to propose one round with half of the members of the last one.

        It is given to whoever holds it already, or has begun the round for which another held it, or has accepted that
        one's proposal and left it since. A number that one has only proposed oneself says nothing: nobody may know of it.

        Returns True where this launcher has the right, False where another has, and None while that is not known.
        """
        record = self.record
        if record is not None and record.life == self.life and (record.number, record.holder) == (mine.next, mine.id):
            return True  # nobody takes it away who has no part in a later round
        if self._is_busy(now):
            return None
        if record is None or record.life != self.life or self.trouble or now - self._read_at > _LOOK_S:
            self.look(now)
            return None
        was_accepted = (record.number, record.holder) == mine.accepted
        if record.holder != mine.id and record.number > mine.begun and not was_accepted:
            return False
        self._swap(replace(record, number=mine.next, holder=mine.id), now)
        return None

    def renew(self, me: str, begun: int, places: Sequence[Place], now: float) -> None:
        """The leader says that the run goes on, and where."""
        if self._is_busy(now):
            return
        if self.trouble or self._read_at == NEVER:
            self.look(now)
            return
        if now - self._renewed_at < RENEW_S:
            return
        self._renewed_at = now
        shown = tuple(places[:_PLACES_AT_MOST])
        if self.record is not None:
            self._swap(replace(self.record, places=shown), now)
        else:
            # The store has lost its memory. Others still find the run; the right to go on is gone, as `life` is another.
            self._swap(Record(self._new_life(), begun, me, shown, host=self.host), now)

    def leave(self, place: Place, now: float) -> bool:
        """Takes this launcher's place out of the record, so that the next run need not wait; returns whether that is done."""
        if self._is_busy(now):
            return False
        if not self._has_asked_to_leave:
            self._has_asked_to_leave = True
            self._ask(Request(self._key()), now)  # the leader may have written this place since it was read here
            return False
        if self.trouble or self.record is None or place not in self.record.places:
            return True
        places = tuple(other for other in self.record.places if other != place)
        self._swap(replace(self.record, places=places) if places else None, now)
        return False

    # Requests

    def _is_busy(self, now: float) -> bool:
        """Whether a request is on its way."""
        if self._pending is not None and now - self._asked_at > ANSWER_S:
            self._pending = None
            self.trouble = f"no answer within {ANSWER_S:g} s"
        return self._pending is not None

    def _swap(self, record: Record | None, now: float) -> None:
        new = None
        if record is not None:
            beat = self.record.beat + 1 if self.record is not None else 0
            new = self.seal.close(replace(record, beat=beat))
        self._ask(Request(self._key(), True, self._value, new), now)

    def _ask(self, request: Request, now: float) -> None:
        self._pending = request
        self._asked_at = now
        self.requests.append(request)

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key
