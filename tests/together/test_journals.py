"""What launchers send each other of a watched run: one message under way, all of it to each new leader, nothing unasked."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.launch.rounds import Member
from paceline_hosts import journals
from paceline_hosts.forwarding import PART_BYTES
from paceline_hosts.journals import JournalExchange
from paceline_hosts.membership.following import Following
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import JournalAnswer, JournalParts, Message, decode, encode
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from paceline_lens.watch.journal import JournalWriter, RunHeader, rank_file, write_header
from paceline_lens.watch.records import Tick


class Launcher:
    """A launcher with a folder of its own, without a network: what it says is in `sent`."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.sent: list[Message] = []
        self.membership = Membership(LauncherState(Member(name, name, 1), Rules(most=2), True, (), 0.0), 0.0)
        self.exchange = JournalExchange(self.membership)
        self.folder = folder
        if folder is not None:
            write_header(folder, RunHeader())
            self.exchange.open(folder)

    def follow(self, leader_id: str) -> None:
        following = Following(self.membership.state, leader_id, 1, True)
        following.send = lambda message: self.sent.append(message)  # type: ignore[method-assign]
        self.membership.role = following

    def write(self, step: int) -> None:
        assert self.folder is not None
        JournalWriter(self.folder / rank_file(1)).append(Tick(step=step))

    def poll(self) -> list[Message]:
        """What it says to its leader now."""
        self.exchange.poll()
        sent, self.sent = self.sent, []
        return sent


def answers(leader: Launcher, messages: list[Message], member_id: str = "b") -> list[Message]:
    """What a leader answers."""
    leader.membership.peers.connection_of[member_id] = 2
    leader.membership.journal_messages += [(member_id, decode(encode(message))) for message in messages]  # type: ignore[misc]
    leader.exchange.take()
    said = [action[2] for action in leader.membership.peers.actions]
    leader.membership.peers.actions.clear()
    return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(journals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_one_message_a_second_and_one_under_way(tmp_path: Path, clock: SimpleNamespace) -> None:
    leader, member = Launcher("a", tmp_path / "a"), Launcher("b", tmp_path / "b")
    assert member.poll() == []  # there is no leader yet
    member.follow("a")
    assert member.poll() == []  # nor anything to say
    member.write(1)
    clock.now += 1
    (first,) = member.poll()
    member.write(2)
    clock.now += 60
    assert member.poll() == []  # a leader that is busy is not flooded
    assert answers(leader, [first]) == [JournalAnswer("next")]
    member.membership.journal_messages.append(("a", JournalAnswer("next")))
    (second,) = member.poll()
    assert answers(leader, [second]) == [JournalAnswer("next")]
    member.membership.journal_messages.append(("a", JournalAnswer("next")))
    member.write(3)
    clock.now += 0.5
    assert member.poll() == []
    clock.now += 0.5
    assert len(member.poll()) == 1
    (copy,) = (tmp_path / "a").glob("rank-*")
    assert copy.read_bytes().count(b"\n") == 2
    assert not list((tmp_path / "b").glob(".host-*"))


def test_another_leader_gets_everything(tmp_path: Path, clock: SimpleNamespace) -> None:
    member = Launcher("b", tmp_path / "b")
    member.follow("a")
    member.write(1)
    assert len(member.poll()) == 1
    member.membership.role = member.membership.search
    clock.now += 1
    assert member.poll() == []
    member.follow("c")
    member.membership.journal_messages.append(("a", JournalAnswer("stop")))  # of the one before, which comes late
    (message,) = member.poll()
    assert isinstance(message, JournalParts)
    assert (message.parts[0].offset, message.parts[0].text.count("\n")) == (0, 1)


def test_a_long_file_is_sent_as_fast_as_it_arrives(tmp_path: Path, clock: SimpleNamespace) -> None:
    member = Launcher("b", tmp_path / "b")
    (tmp_path / "b" / rank_file(1)).write_bytes(b"x" * (2 * PART_BYTES + 1))
    member.follow("a")
    lengths = []
    for _ in range(3):
        (message,) = member.poll()
        assert isinstance(message, JournalParts)
        lengths.append(len(message.parts[0].text))
        assert len(encode(message)) < 1.1 * PART_BYTES
        member.membership.journal_messages.append(("a", JournalAnswer("next")))
    assert lengths == [PART_BYTES, PART_BYTES, 1]


def test_a_leader_that_records_nothing_or_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = Launcher("b", tmp_path / "b")
    member.follow("a")
    member.write(1)
    messages = member.poll()
    assert answers(Launcher("a", None), messages) == [JournalAnswer("stop")]
    full = Launcher("a", tmp_path / "full")
    (tmp_path / "full" / ".rank-00001.b.jsonl").mkdir()
    assert answers(full, messages) == [JournalAnswer("stop")]
    assert "ranks of other hosts are not recorded here" in capsys.readouterr().err
    member.membership.journal_messages.append(("a", JournalAnswer("stop")))
    member.write(2)
    assert member.poll() == []
    member.exchange.send_rest(is_final=True)
    assert member.sent == []


def test_a_run_that_is_not_watched_sends_nothing(tmp_path: Path) -> None:
    member = Launcher("b", None)
    member.follow("a")
    assert member.poll() == []
    member.exchange.send_rest(is_final=True)
    assert member.sent == []


def test_a_folder_that_is_removed_ends_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = Launcher("b", tmp_path / "b")
    member.follow("a")
    (tmp_path / "b").rename(tmp_path / "c")
    assert member.poll() == []
    assert "lacks this host's ranks" in capsys.readouterr().err
    member.exchange.send_rest(is_final=True)
    assert member.sent == []


def test_a_leader_waits_for_the_last_lines(tmp_path: Path) -> None:
    leader, member = Launcher("a", tmp_path / "a"), Launcher("b", tmp_path / "b")
    member.follow("a")
    member.write(1)
    answers(leader, member.poll())
    member.write(2)
    member.exchange.send_rest(is_final=True)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(time.monotonic())
        answers(leader, member.sent)

    leader.exchange.await_last(pause)
    assert pauses == []  # the run goes on: this launcher alone leaves
    leader.membership.state.end = SimpleNamespace()  # type: ignore[assignment]
    leader.exchange.await_last(pause)
    assert len(pauses) == 1
    (copy,) = (tmp_path / "a").glob("rank-*")
    assert copy.read_bytes().count(b"\n") == 2
