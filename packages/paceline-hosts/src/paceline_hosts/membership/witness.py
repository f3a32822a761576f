"""The witness of a run: a store outside the training hosts that breaks ties.

"Witness" is the usual term of cluster software for a voter that runs no work itself. The store says where the launchers of a
run are, and which half of the nodes may go on when the other half is lost. It holds one record for each run, which is changed
only by compare-and-swap. So if two launchers write at the same time, only one succeeds:

    find    without a record this launcher founds the run; else it asks the launchers at the places of the record
    vote    half of the members of a round may go on without the others once the record names one of them as its holder
    renew   the leader writes the places of all members every two seconds; a record that nobody renews may be replaced

This class has no sockets and no clock: the network carries out `requests` and calls `on_answer`. Each value is signed with the
secret of the run, because anybody who reaches the store may write to it. docs/adr/0024-a-witness-off-the-hosts.md says why the
vote is safe.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice

from paceline.base.json_fields import read
from paceline.base.version import VERSION
from paceline.launch.rounds import Name, Number, Place
from paceline_hosts.membership.peers import NEVER

RENEW_S = 2.0
# A record counts as stale if it was not renewed for so long and no launcher that it names answers.
STALE_S = 12.0
ANSWER_S = 4.0  # longer than the timeout of the client (`store_client.py`)
_LOOK_S = 1.0
_PLACES_AT_MOST = 64
_LONGEST = 1 << 16
_PURPOSE = b"paceline-store-1"


class BadSignature(ValueError):
    """A value in the store that was not signed with the secret of this run."""


@dataclass(frozen=True)
class Record:
    """What the store holds for a run.

    Attributes:
        life: a random name from the launcher that founded the run. A store that has lost its data, or holds another run by
            now, has another one.
        number: the round that `holder` may begin with half of the members of the round before.
        holder: the launcher with the vote.
        places: addresses of launchers of the run.
        beat: counts the changes of the record.
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
    """The rounds of a launcher that asks for the vote.

    Attributes:
        id: the id of the launcher.
        begun: the number of the last round that it began.
        next: the number of the round that it would propose.
        accepted: the number and the proposer of the last proposal of another launcher that it has accepted.
    """

    id: str
    begun: int
    next: int
    accepted: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class StoreRequest:
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


class RecordSigner:
    """Signs the records of one run, and checks the signature of those that are read.

    Args:
        secret: the run's.
        run: its name.
    """

    def __init__(self, secret: str, run: str) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE + b" " + run.encode(), "sha256")

    def sign(self, record: Record) -> str:
        """A record as text, with its signature."""
        text = json.dumps(asdict(record))
        return f"{self._tag(text)} {text}"

    def verify(self, value: str) -> Record:
        """Reads a signed record.

        Raises:
            BadSignature: the value was not signed with this secret for this run.
        """
        tag, _, text = value[:_LONGEST].partition(" ")
        if not hmac.compare_digest(tag.encode(errors="replace"), self._tag(text).encode()):
            raise BadSignature("it was not signed with the secret of this run")
        try:
            record: Record = read(Record, json.loads(text), "record")
        except RecursionError:
            raise BadSignature("it is nested too deeply") from None
        return record

    def _tag(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(errors="replace"), "sha256").hex()


class Witness:
    """The store, as one launcher sees it.

    Args:
        signer: signs and checks the records of the run.
        host: the name of this host.
        new_life: draws a random name for a new record.
        name: the name of the store in messages for the user.
        now: the time in seconds of a monotonic clock.

    Attributes:
        requests: requests that the network is to send.
        record: the record that was read last; None for none.
        life: the `life` of the record that this launcher read first. A record with another one is not trusted, because its
            store may have lost the vote.
        trouble: why the store cannot be used at the moment; "" while it can.
    """

    def __init__(self, signer: RecordSigner, host: str, new_life: Callable[[], str], name: str, now: float) -> None:
        self.signer = signer
        self.host = host
        self.name = name
        self.requests: list[StoreRequest] = []
        self.record: Record | None = None
        self.life = ""
        self.trouble = ""
        self._new_life = new_life
        self._value: str | None = None
        self._is_foreign = False
        self._changed_at = now  # when the value was first seen as it is now
        self._read_at = NEVER
        self._renewed_at = NEVER
        self._pending: StoreRequest | None = None
        self._asked_at = NEVER
        self._next_key = 1
        self._has_asked_to_leave = False

    @property
    def places(self) -> tuple[Place, ...]:
        """The addresses of launchers of the run, as the store has them."""
        return self.record.places if self.record is not None else ()

    @property
    def why_not(self) -> str:
        """Why the store gives nobody the vote; "" where it can."""
        if self.trouble:
            return f"{self.name}: {self.trouble}"
        if self.is_lost:
            return f"{self.name} has lost what it knew of this run"
        return ""

    @property
    def is_lost(self) -> bool:
        """Whether the store has lost the record of this run. It can then give nobody the vote."""
        return bool(self.life) and self._read_at > NEVER and (self.record is None or self.record.life != self.life)

    def on_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """Takes in the answer to a request: the value that the store has now, or why there is none."""
        if self._pending is None or self._pending.key != key:
            return  # this request has timed out; the next one shows whether it had an effect
        self._pending = None
        if trouble:
            self.trouble = trouble
            return
        # Nobody can renew a record while the store cannot be reached, so its age is counted from now on.
        if self.trouble or value != self._value:
            self._changed_at = now
        self.trouble = ""
        self._read_at = now
        self._value = value
        self._is_foreign = False
        self.record = None
        if value:
            try:
                self.record = self.signer.verify(value)
            except ValueError as error:
                self._is_foreign = True
                self.trouble = f"it holds something else for this run: {error}"
        if self.record is not None and not self.life:
            self.life = self.record.life

    # Called by the membership

    def look(self, now: float) -> None:
        """Reads the record, if the last request was some time ago."""
        if not self._is_busy(now) and now - self._asked_at >= _LOOK_S:
            self._ask(StoreRequest(self._key()), now)

    def found(self, me: str, place: Place, nobody_answers: bool, now: float) -> bool:
        """Tries to found the run, if no other run of this name goes on. Returns whether this launcher founds it.

        Args:
            me, place: the id and the address of this launcher.
            nobody_answers: whether no launcher answered at any place of the record.
            now: the time in seconds.
        """
        self.look(now)
        if self._read_at == NEVER or self._is_foreign:
            return False
        record = self.record
        if record is not None and (record.holder, record.number) == (me, 0) and record.life == self.life:
            return True
        is_stale = nobody_answers and now - self._changed_at > STALE_S
        if (record is None or not record.places or is_stale) and not self.trouble and not self._is_busy(now):
            # This launcher was never a member of the run of the old record.
            self.life = self._new_life()
            self._swap(Record(self.life, 0, me, (place,), host=self.host), now)
        elif record is not None and self._pending is None:
            self.life = record.life
        return False

    def vote(self, mine: Standing, now: float) -> bool | None:
        """Asks for the vote: the right to propose the next round with half of the members of the last one.

        A launcher gets the vote if it holds it already, if it has begun the round of the current holder, or if it has accepted
        the proposal of that holder. A proposal of its own does not count, because no other launcher may know of it.

        Returns:
            True if this launcher has the vote, False if another launcher has it, None while that is not known.
        """
        record = self.record
        if record is not None and record.life == self.life and (record.number, record.holder) == (mine.next, mine.id):
            return True  # only a launcher with a part in a later round could take it away
        if self._is_busy(now):
            return None
        if record is None or record.life != self.life or self.trouble or now - self._read_at > _LOOK_S:
            self.look(now)
            return None
        # The holder may have begun a round of which this launcher knows nothing. It must not begin another one beside it.
        was_accepted = (record.number, record.holder) == mine.accepted
        if record.holder != mine.id and record.number > mine.begun and not was_accepted:
            return False
        self._swap(replace(record, number=mine.next, holder=mine.id), now)
        return None

    def renew(self, me: str, begun: int, places: Iterable[Place], now: float) -> None:
        """Renews the record, as the leader: the run goes on at these places."""
        if self._is_busy(now):
            return
        if self.trouble or self._read_at == NEVER:
            self.look(now)
            return
        if now - self._renewed_at < RENEW_S:
            return
        self._renewed_at = now
        # A new launcher needs only one place that answers, and a store limits the size of a value.
        shown = tuple(islice(places, _PLACES_AT_MOST))
        if self.record is not None:
            self._swap(replace(self.record, places=shown), now)
        else:
            # The store has lost the record. With the new one other launchers find the run, but nobody can get the vote any
            # more, because `life` is another.
            self._swap(Record(self._new_life(), begun, me, shown, host=self.host), now)

    def leave(self, place: Place, now: float) -> bool:
        """Removes this launcher from the record, so that the next run need not wait. Returns whether that is done."""
        if self._is_busy(now):
            return False
        if not self._has_asked_to_leave:
            self._has_asked_to_leave = True
            self._ask(StoreRequest(self._key()), now)  # the leader may have added this place since the last read
            return False
        if self.trouble or self.record is None or place not in self.record.places:
            return True
        places = tuple(other for other in self.record.places if other != place)
        # Whoever leaves last removes the whole record, so that the next run of this name begins a new one.
        record = replace(self.record, places=places) if places else None
        self._swap(record, now)
        return False

    # Requests

    def _is_busy(self, now: float) -> bool:
        """Returns whether a request waits for its answer."""
        if self._pending is not None and now - self._asked_at > ANSWER_S:
            self._pending = None
            self.trouble = f"no answer within {ANSWER_S:g} s"
        return self._pending is not None

    def _swap(self, record: Record | None, now: float) -> None:
        new = None
        if record is not None:
            beat = self.record.beat + 1 if self.record is not None else 0
            new = self.signer.sign(replace(record, beat=beat))
        self._ask(StoreRequest(self._key(), True, self._value, new), now)

    def _ask(self, request: StoreRequest, now: float) -> None:
        self._pending = request
        self._asked_at = now
        self.requests.append(request)

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key
