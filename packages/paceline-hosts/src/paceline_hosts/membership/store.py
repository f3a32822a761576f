"""How one launcher uses the store: to find the run, and to renew its record. `LauncherState.has_quorum` asks for its vote."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.version import VERSION
from paceline.launch.rounds import End, Place
from paceline_hosts.membership.errors import other_version
from paceline_hosts.membership.search import Search
from paceline_hosts.membership.state import LauncherState
from paceline_hosts.membership.witness import Witness


class StoreOfRun:
    """Connects the state of one launcher with the store.

    Args:
        state: of this launcher.
        witness: the store, as this launcher sees it.
    """

    def __init__(self, state: LauncherState, witness: Witness) -> None:
        self.state = state
        self.witness = witness
        self._places: tuple[Place, ...] = ()
        self._trouble = ""

    def on_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """Takes in an answer of the store. The places that it names replace those that it named before among the contacts."""
        self.witness.on_answer(key, value, trouble, now)
        places = self.witness.places
        if places != self._places:
            contacts = [place for place in self.state.contacts if place not in self._places]
            others = [place for place in places if place not in contacts and place != self.state.me.place]
            self.state.contacts[:] = contacts + others
            self._places = places

    def leave(self, now: float) -> bool:
        """Removes this launcher from the store at its end; to be called until it returns true."""
        return self.witness.leave(self.state.me.place, now)

    def seek(self, search: Search, now: float) -> None:
        """Looks for other launchers, which may have moved. If nobody has a run, this launcher begins one.

        Neither the store nor the places that it names have one then.
        """
        state = self.state
        self.witness.look(now)
        if not state.configurations and state.report is not None and not state.is_founder:
            state.found(self.witness.found(state.me.id, state.me.place, search.is_nowhere(), now))

    def renew(self, here: Iterable[str], now: float) -> None:
        """Renews the record, as the leader of `here`, and notes when the store is lost and when it is back."""
        state = self.state
        self.witness.renew(state.me.id, state.begun, map(state.place_of, here), now)
        trouble = self.witness.why_not
        if trouble and not self._trouble:
            state.notes.append(
                f"the store cannot vote ({trouble}): this run goes on while more than half of its nodes are left"
            )
        elif self._trouble and not trouble:
            state.notes.append(f"{self.witness.name} can be reached again")
        self._trouble = trouble

    def check_version(self, is_answered: bool) -> None:
        """Ends a launcher that has found a run of another version of Paceline, before its first round.

        A record does not count if no launcher that it names answers: its run may have ended.
        """
        record = self.witness.record
        is_other = record is not None and record.version != VERSION
        if record is not None and is_other and is_answered and not self.state.configurations:
            self.state.finish(End(1, error=other_version(record.host, record.version)))
