"""The memory of a process that trains on a CPU goes into huge pages."""

import mmap
from pathlib import Path

import pytest

from paceline import Accelerator
from paceline.huge_pages import HUGE_PAGE, HugePages, _are_allowed, huge_page_addresses
from paceline.world.events import Event

needs_huge_pages = pytest.mark.skipif(not _are_allowed(), reason="this host makes no huge pages")

MAPPINGS = """\
00400000-00e00000 rw-p 00000000 fe:00 123 /usr/bin/python3
Rss:               10240 kB
00f00000-01600000 rw-p 00000000 00:00 0 [heap]
Size:               7168 kB
Rss:                6656 kB
VmFlags: rd wr mr mw me ac
02000000-02600000 rw-p 00000000 00:00 0
Rss:                3072 kB
03000000-03600000 rw-p 00000000 00:00 0
Rss:                6144 kB
04000000-04400000 rw-s 00000000 00:00 0
Rss:                4096 kB
05000000-05400000 rw-p 00000000 00:00 0 [stack]
Rss:                4096 kB
06000000-06010000 rw-p 00000000 00:00 0
Rss:                  64 kB
"""


def test_parts_of_the_heap_that_are_almost_full_are_worth_a_huge_page() -> None:
    heap = [0x01000000, 0x01200000, 0x01400000]
    full_mapping = [0x03000000, 0x03200000, 0x03400000]
    assert huge_page_addresses(MAPPINGS.splitlines()) == [*heap, *full_mapping]


def test_nothing_is_looked_up_before_the_delay_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("paceline.huge_pages.huge_page_addresses")
    before_step = Event()
    HugePages(before_step, delay_s=3600)
    before_step(None)
    before_step(None)
    assert before_step


def test_a_host_that_hides_its_mappings_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("paceline.huge_pages.open", refuse, raising=False)
    before_step = Event()
    HugePages(before_step, delay_s=0)
    before_step(None)
    assert not before_step


@needs_huge_pages
def test_the_memory_of_this_process_goes_into_huge_pages() -> None:
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * len(memory))
    bytes_before = _bytes_in_huge_pages()
    before_step = Event()
    HugePages(before_step, delay_s=0)
    while before_step:
        before_step(None)
    # It begins anywhere, so that one huge page less fits.
    assert _bytes_in_huge_pages() - bytes_before >= 7 * HUGE_PAGE
    assert memory[:] == b"\1" * len(memory)


@needs_huge_pages
def test_a_run_on_the_cpu_uses_huge_pages() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.run.events.before_step


def _bytes_in_huge_pages() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    counts = {line.split()[0]: line.split()[1] for line in lines}
    return int(counts["AnonHugePages:"]) << 10
