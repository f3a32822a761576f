"""`HugePages`: moves the memory of a process that trains on a CPU into huge pages.

A page of memory has 4 KiB, and a huge page has 2 MiB. For each access, the processor translates the number of the page, and it
remembers only a few thousand pages. The objects of Python and the tensors of a training step lie in many more, so that it
translates again and again. In huge pages, a step of a small language model took 6 % less time.

    the first step             nothing is done yet: a short run would not get back what the move costs
    20 s later                 the parts of memory that are worth it are looked up, once
    each step after that       one huge page is made, which copies 2 MiB, until all are made

Only the place of the memory changes, not what it contains. Linux does the copying (`MADV_COLLAPSE`, since version 6.1). On
another system, and where its administrator has switched huge pages off, nothing is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch.optim import Optimizer

from paceline.base.libc import libc
from paceline.base.log import logger
from paceline.run.run import Run
from paceline.world.events import Event

HUGE_PAGE = 2 << 20

# A move took 0.5 to 1 s of processor time for 270 MB in a virtual machine, as much as it saves in about 20 s of training. A run
# that has trained for so long most often trains for as long again.
_DELAY_S = 20.0
# Memory that nobody has used yet becomes real memory when it is moved. So only parts that are almost full are moved.
_LEAST_RESIDENT = 0.9
# Of Linux 6.1 and later; `mmap` does not name it.
_MADV_COLLAPSE = 25
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def use_huge_pages(run: Run) -> None:
    """Moves the memory of this process into huge pages once the run has trained for a while, where that is possible."""
    # On an accelerator this was never measured.
    if run.device.type == "cpu" and _are_allowed():
        HugePages(run.events.before_step)


class HugePages:
    """Makes one huge page in each step, from 20 s after the first step on.

    Args:
        before_step: the event of the run that happens once for each step.
        delay_s: seconds of training before the first huge page is made.
    """

    def __init__(self, before_step: Event[[Optimizer]], delay_s: float = _DELAY_S) -> None:
        self._delay_s = delay_s
        self._begins_at: float | None = None
        self._addresses: Iterator[int] | None = None
        self._unsubscribe = before_step.subscribe(self._before_step)

    def _before_step(self, optimizer: Optimizer) -> None:
        now = time.monotonic()
        if self._begins_at is None:
            self._begins_at = now + self._delay_s
        if now < self._begins_at:
            return
        if self._addresses is None:
            self._addresses = iter(_addresses_of_this_process())
        address = next(self._addresses, None)
        library = libc()
        if address is None or library is None:
            self._unsubscribe()
            return
        # Nothing depends on the result. Linux refuses a part that was freed since, or if it has no huge page left.
        library.madvise(address, HUGE_PAGE, _MADV_COLLAPSE)


def _addresses_of_this_process() -> list[int]:
    """Returns the addresses of the huge pages that are worth making now; none where Linux does not show its mappings."""
    try:
        with open("/proc/self/smaps") as mappings:
            addresses = huge_page_addresses(mappings)
    except OSError as error:
        # A container may hide this file. The run is right without huge pages, so it goes on.
        logger("memory").debug("no huge pages are made: %s", error)
        return []
    logger("memory").debug("%d huge pages of 2 MiB are made, one in each step.", len(addresses))
    return addresses


def huge_page_addresses(mappings: Iterable[str]) -> list[int]:
    """Returns the addresses of the huge pages that are worth making.

    Args:
        mappings: lines of `/proc/self/smaps`. A mapping has a line with its addresses, access, file and name, and then one
            line for each property, such as `Rss:`, the part of it that is in memory.
    """
    addresses: list[int] = []
    start = stop = 0
    for line in mappings:
        words = line.split()
        if not words[0].endswith(":"):
            first, _, last = words[0].partition("-")
            start, stop = int(first, 16), int(last, 16)
            # `[heap]` is malloc's memory. The mappings of Python's own allocator have no name.
            is_heap = len(words) == 5 or words[5] == "[heap]"
            is_private = words[1] == "rw-p"
            if not (is_heap and is_private):
                start = stop
        elif words[0] == "Rss:" and int(words[1]) << 10 >= _LEAST_RESIDENT * (stop - start):
            aligned_start = -(-start // HUGE_PAGE) * HUGE_PAGE
            aligned_stop = stop - stop % HUGE_PAGE
            addresses += range(aligned_start, aligned_stop, HUGE_PAGE)
    return addresses


def _are_allowed() -> bool:
    """Returns whether Linux makes huge pages of the expected size for a process that asks for them."""
    try:
        mode = (_SETTINGS / "enabled").read_text()
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:
        return False
    return "[never]" not in mode and size == HUGE_PAGE
