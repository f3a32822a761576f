"""The journal of another host, copied where hosts share no folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_hosts.forwarding import FilePart, JournalCopies, JournalSender, mark, unmark
from paceline_lens.watch.journal import JournalReader, JournalWriter, RunHeader, rank_file, write_header
from paceline_lens.watch.records import Tick

SENDER = "4711-9f86d081884c"
COPY = f"rank-00001.{SENDER}.jsonl"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder of the host that leads."""
    write_header(tmp_path / "here", RunHeader(started=100.0, procs=2))
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """That of another host."""
    write_header(tmp_path / "there", RunHeader(started=100.0, procs=2))
    return tmp_path / "there"


def copy_all(sender: JournalSender, copies: JournalCopies, limit_bytes: int = 1 << 16) -> int:
    """Copies all there is; returns how many messages that took."""
    count = 0
    while parts := sender.parts(limit_bytes):
        assert copies.add(SENDER, tuple(parts)) == "next"
        count += 1
    return count


def test_a_copy_grows_with_its_file(here: Path, there: Path) -> None:
    writer = JournalWriter(there / rank_file(1))
    sender, copies = JournalSender(there), JournalCopies(here)
    reader = JournalReader(here)
    for step in range(3):
        writer.append(Tick(step=step), 101.0 + step)
        assert copy_all(sender, copies) == 1
        assert copy_all(sender, copies) == 0  # nothing is said where nothing is new
        (line,) = reader.read()
        assert (line.role, line.number, line.t, line.record) == ("rank", 1, 101.0 + step, Tick(step=step))
    assert (here / COPY).read_bytes() == (there / rank_file(1)).read_bytes()


def test_a_long_file_goes_in_parts_and_appears_as_a_whole(here: Path, there: Path) -> None:
    writer = JournalWriter(there / rank_file(1))
    writer.write([(Tick(step=step), 101.0 + step) for step in range(50)])
    size = (there / rank_file(1)).stat().st_size
    sender, copies = JournalSender(there), JournalCopies(here)
    for _ in range(size // 1000):
        (part,) = sender.parts(1000)
        assert (len(part.text), part.is_last) == (1000, False)
        copies.add(SENDER, (part,))
        assert JournalReader(here).read() == []  # a reader would take the rank for one that is silent
    copy_all(sender, copies)
    assert [line.record for line in JournalReader(here).read()] == [Tick(step=step) for step in range(50)]


def test_a_file_that_is_thinned_is_copied_again(here: Path, there: Path) -> None:
    writer = JournalWriter(there / rank_file(1), limit_bytes=6000)
    sender, copies = JournalSender(there), JournalCopies(here)
    reader = JournalReader(here)
    seen = []
    for step in range(200):
        writer.append(Tick(step=step, steps=1), 101.0 + step)
        copy_all(sender, copies)
        seen += [line.record.step for line in reader.read() if isinstance(line.record, Tick)]
    assert seen == list(range(200))
    assert (here / COPY).read_bytes() == (there / rank_file(1)).read_bytes()
    assert (here / COPY).stat().st_size < 6000


def test_another_host_that_begins_to_lead_gets_everything(here: Path, there: Path, tmp_path: Path) -> None:
    writer = JournalWriter(there / rank_file(1))
    writer.write([(Tick(step=step), 101.0 + step) for step in range(5)])
    sender = JournalSender(there)
    copy_all(sender, JournalCopies(here))
    write_header(tmp_path / "third", RunHeader())
    sender.begin()
    copy_all(sender, JournalCopies(tmp_path / "third"))
    # The first one again, which has a copy already.
    sender.begin()
    copy_all(sender, JournalCopies(here), limit_bytes=100)
    for folder in (here, tmp_path / "third"):
        assert (folder / COPY).read_bytes() == (there / rank_file(1)).read_bytes()


def test_a_part_that_does_not_fit_is_asked_for_again(here: Path, there: Path) -> None:
    JournalWriter(there / rank_file(1)).append(Tick(step=1), 101.0)
    sender, copies = JournalSender(there), JournalCopies(here)
    (part,) = sender.parts()
    assert copies.add(SENDER, (FilePart(part.name, 7, part.text, is_last=True),)) == "again"
    assert not (here / COPY).exists()
    sender.begin()
    assert copy_all(sender, copies) == 1


def test_a_host_that_shares_the_folder_is_told_to_stop(here: Path) -> None:
    JournalWriter(here / rank_file(1)).append(Tick(step=1), 101.0)
    sender, copies = JournalSender(here), JournalCopies(here)
    mark(here, SENDER)
    assert copies.add(SENDER, tuple(sender.parts())) == "stop"
    unmark(here, SENDER)
    unmark(here, SENDER)
    assert copies.add(SENDER, ()) == "stop"
    assert sorted(path.name for path in here.iterdir()) == [rank_file(1), "run.json"]
    # A copy that this host holds, of a time in which it led, is not its own to send.
    JournalWriter(here / COPY).append(Tick(step=1), 101.0)
    sender.begin()
    assert [part.name for part in sender.parts()] == [rank_file(1)]


@pytest.mark.parametrize("name", ["../run.json", "run.json", "rank-00001.jsonl/../../x", COPY, "rank-1.jsonl\n"])
def test_nothing_but_files_of_a_journal_is_written(here: Path, name: str) -> None:
    before = sorted(here.parent.rglob("*"))
    header = (here / "run.json").read_bytes()
    copies = JournalCopies(here)
    assert copies.add("../../x", (FilePart(name, 0, "text", is_last=True),)) == "next"
    assert sorted(here.parent.rglob("*")) == before
    assert (here / "run.json").read_bytes() == header
    copies.add("../../x", (FilePart(rank_file(1), 0, "text", is_last=True),))
    assert (here / "rank-00001.______x.jsonl").read_text() == "text"


def test_bytes_that_are_no_text_arrive_as_they_are(here: Path, there: Path) -> None:
    data = bytes(range(256)) * 300 + b"\n"
    (there / rank_file(1)).write_bytes(data)
    copy_all(JournalSender(there), JournalCopies(here))
    assert (here / COPY).read_bytes() == data


def test_a_view_begins_anew_where_an_older_file_comes_late(here: Path, there: Path) -> None:
    own = JournalWriter(here / rank_file(0))
    own.append(Tick(step=1), 200.0)
    reader = JournalReader(here)
    reader.read()
    assert not reader.has_late_file
    other = JournalWriter(there / rank_file(1))
    other.append(Tick(step=1), 101.0)
    copy_all(JournalSender(there), JournalCopies(here))
    assert len(reader.read()) == 1
    assert reader.has_late_file
    reader.read()
    assert not reader.has_late_file
