"""The journal: what is written is read, while it grows, when it is damaged, and when it has become too long."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest
from synthetic_journal import STARTED, write_synthetic

from paceline import ConfigError
from paceline_lens.watch.journal import JournalReader, JournalWriter, RunHeader, rank_file, read_header, write_header
from paceline_lens.watch.records import (
    KINDS,
    AnomalyFound,
    Hello,
    LauncherEnded,
    PlanMade,
    Thinned,
    Tick,
    ValuesLogged,
    line_of,
    record_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_header(tmp_path, RunHeader(name="run", procs=2))
    return tmp_path


def records(reader: JournalReader) -> list[object]:
    return [line.record for line in reader.read()]


def test_each_kind_is_read_as_it_was_written() -> None:
    for kind in KINDS.values():
        assert record_of(line_of(kind(), 12.5)) == (12.5, kind())
    tick = Tick(3, 10, 96, None, "data", 6.25, {"data": 1.5}, 2, 1 << 40, None, "data.py:41")
    plan = PlanMade("text", [["dp", "2", "default", "why"]], 1.5, 2, 1e12)
    assert record_of(line_of(tick, 1.0)) == (1.0, tick)
    assert record_of(line_of(plan, 1.0)) == (1.0, plan)


def test_floats_without_a_word_in_json() -> None:
    values = ValuesLogged(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "nan": 1.0})
    line = line_of(values, 1.0)
    assert json.loads(line)["values"] == {"a": "nan", "b": "inf", "c": "-inf", "nan": 1.0}
    _, read = record_of(line)
    assert isinstance(read, ValuesLogged)
    assert math.isnan(read.values["a"])
    assert (read.values["b"], read.values["c"]) == (math.inf, -math.inf)
    anomaly = AnomalyFound(1, "nan", math.inf, None)
    assert record_of(line_of(anomaly, 1.0))[1] == anomaly  # the word "nan" of a text stays a text


def test_a_reader_follows(folder: Path) -> None:
    reader = JournalReader(folder)
    assert reader.read() == []
    rank0, rank1 = (JournalWriter(folder / rank_file(rank)) for rank in range(2))
    rank1.append(Tick(step=2), 5.0)
    rank0.append(Tick(step=1), 4.0)
    assert [(line.number, line.t, line.role) for line in reader.read()] == [(0, 4.0, "rank"), (1, 5.0, "rank")]
    rank1.append(Tick(step=3), 6.0)
    assert records(reader) == [Tick(step=3)]
    assert reader.read() == []


def test_an_unfinished_line_is_left_for_later(folder: Path) -> None:
    reader = JournalReader(folder)
    line = line_of(Tick(step=7), 3.0)
    path = folder / rank_file(0)
    path.write_bytes(line + line_of(Tick(step=8), 4.0)[:10])
    assert records(reader) == [Tick(step=7)]
    path.write_bytes(line + line_of(Tick(step=8), 4.0))
    assert records(reader) == [Tick(step=8)]


def test_damaged_and_unknown_lines_are_counted(folder: Path) -> None:
    good = line_of(LauncherEnded(), 9.0)
    lines = [
        b"\xff\x00\n", b"[1]\n", b'{"t":1,"kind":"tick","step":"x"}\n', b'{"kind":"tick"}\n', b'{"t":"nan","kind":"end"}\n',
        b'{"t":true,"kind":"end"}\n', b"[" * 100_000 + b"\n", b'{"t":1,"kind":"from-the-future"}\n',
        b'{"t":2,"kind":"end","exit_code":0,"colour":"red"}\n', good,
    ]  # fmt: skip
    (folder / "launcher-0.jsonl").write_bytes(b"".join(lines))
    (folder / "notes.jsonl").write_bytes(good)
    reader = JournalReader(folder)
    assert records(reader) == [LauncherEnded(), LauncherEnded()]
    assert (reader.damaged, reader.unknown) == (7, 1)


def test_what_a_crash_left_spoils_one_line(folder: Path) -> None:
    path = folder / rank_file(0)
    path.write_bytes(line_of(Tick(step=1), 100.0) + b'{"t":101,"ki')
    JournalWriter(path).append(Hello(restart=1), 50.0)  # a clock that was set back
    reader = JournalReader(folder)
    lines = reader.read()
    assert [line.record for line in lines] == [Tick(step=1), Hello(restart=1)]
    assert lines[1].t > lines[0].t == 100.0
    assert reader.damaged == 1


def test_a_forked_process_writes_nothing(folder: Path) -> None:
    writer = JournalWriter(folder / rank_file(0))
    with writer._lock:  # as another thread may hold it at that moment
        child = os.fork()
        if child == 0:
            writer.append(Tick(step=99))
            writer.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.append(Tick(step=1))
    assert records(JournalReader(folder)) == [Tick(step=1)]


def test_threads_write_whole_lines(folder: Path) -> None:
    writer = JournalWriter(folder / rank_file(0))

    def write(step: int) -> None:
        for _ in range(50):
            writer.append(ValuesLogged(step, {"loss": 1.0}))

    threads = [threading.Thread(target=write, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = JournalReader(folder)
    moments = [line.t for line in reader.read()]
    assert len(set(moments)) == 200
    assert reader.damaged == 0


def test_a_file_stays_below_its_limit(folder: Path) -> None:
    limit = 20_000
    writer = JournalWriter(folder / rank_file(0), limit)
    early, late = JournalReader(folder), JournalReader(folder)
    writer.append(Hello(), 1.0)
    seen = []
    for second in range(2, 2000):
        writer.append(Tick(step=second, ms={"forward": 10.0}, steps=1), float(second))
        if second % 7 == 0:
            seen += early.read()
    seen += early.read()
    assert os.path.getsize(folder / rank_file(0)) <= limit + 200
    # Who followed has each line once; who comes late has fewer, of which none is lost in the sums.
    steps = [line.record.step for line in seen if isinstance(line.record, Tick)]
    assert steps == list(range(2, 2000))
    lines = late.read()
    marks = [line.record for line in lines if isinstance(line.record, Thinned)]
    ticks = [line.record for line in lines if isinstance(line.record, Tick)]
    assert marks[0].times > 1
    assert marks[0].dropped + len(ticks) == 1998
    assert sum(tick.steps for tick in ticks) == 1998
    assert sum(tick.ms["forward"] for tick in ticks) == 19_980.0
    assert isinstance(lines[1].record, Hello)


def test_lines_too_long_for_the_limit_go_oldest_first(folder: Path) -> None:
    writer = JournalWriter(folder / rank_file(0), 10_000)
    writer.append(Hello(), 1.0)
    for second in range(2, 100):
        writer.append(PlanMade(text="x" * 300) if second == 2 else LauncherEnded(why="y" * 900), float(second))
    lines = JournalReader(folder).read()
    assert [type(line.record) for line in lines[:3]] == [Thinned, Hello, PlanMade]
    assert lines[-1].t == 99.0


def test_a_disk_that_is_full_spoils_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(folder / rank_file(0))
    real = os.write
    with monkeypatch.context() as patch:

        def half(file: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return real(file, data[: len(data) // 2])

        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            writer.append(Tick(step=1))
    writer.append(Tick(step=2))
    reader = JournalReader(folder)
    assert records(reader) == [Tick(step=2)]
    assert reader.damaged == 1


def test_a_folder_of_another_version(folder: Path) -> None:
    (folder / "run.json").write_text('{"version": 2, "name": "later"}')
    with pytest.raises(ConfigError, match="newer Paceline") as error:
        JournalReader(folder)
    assert error.value.code == "watch-version"
    (folder / "run.json").write_text('{"version": 1, "name": "now", "colour": "red"}')
    assert read_header(folder).name == "now"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"version": "1"}', "{"])
def test_a_folder_without_a_run(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        JournalReader(tmp_path)
    assert error.value.code == "watch-folder"


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    write_header(tmp_path / "watch", RunHeader())
    reader = JournalReader(tmp_path)
    assert reader.folder == tmp_path / "watch"
    (tmp_path / "watch" / "run.json").unlink()
    (tmp_path / "watch").rmdir()
    with pytest.raises(ConfigError) as error:
        reader.read()
    assert error.value.code == "watch-folder"


def test_the_synthetic_journal(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "watch", restart_at=30, stuck_at=50, nan_at=10, exit_code=1)
    reader = JournalReader(tmp_path)
    lines = reader.read()
    assert reader.damaged == reader.unknown == 0
    assert {line.record.kind for line in lines} == set(KINDS) - {"thinned"}
    assert lines[0].t == STARTED
    ticks = [line.record for line in lines if isinstance(line.record, Tick) and line.record.steps]
    assert {round(sum(tick.ms.values())) for tick in ticks} == {1000}
