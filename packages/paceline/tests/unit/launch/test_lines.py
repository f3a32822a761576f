"""Processes that share one output: their lines are never joined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LINE = re.compile(r"<(\d) \d+ x+>")
SCRIPT = """
import sys
from pathlib import Path
from paceline.launch.worker.lines import write_whole_lines

write_whole_lines(Path(sys.argv[1]) / "report")
for number in range(int(sys.argv[3])):
    print(f"<{sys.argv[2]} {number} {'x' * int(sys.argv[4])}>")
    print(f"<{sys.argv[2]} {number} {'x' * int(sys.argv[4])}>", file=sys.stderr)
print(f"<{sys.argv[2]} 0 x>", end=sys.argv[5])
"""


def written(folder: Path, num_lines: int, length: int, end: str, unbuffered: bool) -> str:
    """What two processes write to one pipe, by standard output and error."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    read, write = os.pipe()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(rank), str(num_lines), str(length), end],
            env=environ,
            stdout=write,
            stderr=write,
        )
        for rank in range(2)
    ]
    os.close(write)
    with open(read, newline="") as stream:
        text = stream.read()
    assert [process.wait() for process in started] == [0, 0]
    return text


@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize(("num_lines", "length"), [(3000, 40), (20, 200_000)])
def test_no_line_is_broken(num_lines: int, length: int, unbuffered: bool, tmp_path: Path) -> None:
    lines = written(tmp_path, num_lines, length, "\n", unbuffered).splitlines()
    broken = [line for line in lines if not LINE.fullmatch(line)]
    assert not broken and len(lines) == 2 * (2 * num_lines + 1)


def test_on_a_terminal_lines_of_other_ranks_begin_with_the_rank(tmp_path: Path) -> None:
    """Marked on a terminal alone, and never a bar or what `flush` divides."""
    script = (
        "import sys; from pathlib import Path; from paceline.launch.worker.lines import write_whole_lines; "
        "write_whole_lines(Path(sys.argv[1]) / 'report'); print('epoch', 1, flush=True); "
        "print('a', end='', flush=True); print('b'); print('50%', end='\\r'); print('two\\nlines')"
    )
    plain = b"epoch 1\nab\n50%\rtwo\nlines\n"
    marked = b"[rank3]: epoch 1\n[rank3]: ab\n50%\r[rank3]: two\n[rank3]: lines\n"
    for local_rank, expected in (("0", plain), ("1", marked)):
        master, terminal = os.openpty()
        environ = {**os.environ, "LOCAL_RANK": local_rank, "RANK": "3"}
        words = [sys.executable, "-c", script, str(tmp_path)]
        subprocess.run(words, env=environ, stdout=terminal, check=True)
        os.close(terminal)
        assert os.read(master, 4096).replace(b"\r\n", b"\n") == expected
        os.close(master)
        assert subprocess.run(words, env=environ, stdout=subprocess.PIPE, check=True).stdout == plain


@pytest.mark.parametrize("end", ["", "\r"])
def test_a_last_line_without_a_newline_stays_alone(end: str, tmp_path: Path) -> None:
    lines = written(tmp_path, 50, 40, end, True).splitlines()
    assert all(LINE.fullmatch(line) for line in lines) and len(lines) == 2 * (2 * 50 + 1)


def test_unfinished_text_appears_when_it_is_flushed(tmp_path: Path) -> None:
    from paceline.launch.worker.lines import SharedStream

    read, write = os.pipe()
    stream = SharedStream(write, tmp_path)
    for text, shown in ((b"begun", b"begun"), (b" and ended\n", b" and ended\n"), (b"bar\r", b"bar\r")):
        stream.write(text)
        stream.flush()
        assert os.read(read, 100) == shown
    stream.write(b"begun")
    stream.flush()
    if os.fork() == 0:
        stream.write(b"another\n")
        os._exit(0)
    os.wait()
    assert os.read(read, 100) == b"begun\nanother\n"
