"""Reports of hangs: which rank waits where, and for which; and whether no rank makes progress. A part has them.

Without them a run still ends at its timeout, or where a rank has ended; nobody says what the ranks did until then.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from paceline.base.parts import extra_with, how_to_install
from paceline.base.registry import Registry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from paceline.world.world import World

HANG_REPORTS = Registry("paceline.hang_reports", "watch over")
_NAME = "hangs"


class CheckOfCalls(Protocol):
    """Debug mode, in one group."""

    def check(self, op: str, detail: str = "") -> None:
        """Waits for the other ranks, and compares what they are about to do with what this rank is about to do.

        Raises:
            CollectiveError: `collective-diverged`, `collective-missing`.
        """
        ...


class HangReports(Protocol):
    """A module with these functions. Those that watch do so until this process leaves its group."""

    def watch_waits(self, report_s: float, timeout_s: float | None, computes_on_cpu: bool) -> None:
        """Starts to report waits of this process. A second call changes nothing.

        Args:
            report_s: seconds after which a rank that waits is reported.
            timeout_s: seconds after which a collective fails, for the text of the report.
            computes_on_cpu: whether a busy thread computes.
        """
        ...

    def watch_progress(self, world: World, stuck_after: str, computes_on_cpu: bool) -> Any:
        """Starts to write whether this process makes progress; None if nobody would read it.

        Args:
            world: this process, after it has joined its group.
            stuck_after: the setting `stuck_after`.
            computes_on_cpu: whether a busy process computes.
        """
        ...

    def call_check(self, group: ProcessGroup, timeout_s: float | None, computes_on_cpu: bool) -> CheckOfCalls:
        """Makes debug mode's check of a group."""
        ...

    def backward_failed(self, error: BaseException) -> None:
        """Tells the other ranks of an error in a backward pass: they would wait for this rank's gradients."""
        ...

    def backward_passed(self) -> None:
        """Takes that back, because a later backward pass of this rank has succeeded."""
        ...

    def last_report(self, operation: str) -> list[str]:
        """Returns where each rank was when a wait of this rank in `operation` was reported last; [] if none was."""
        ...

    def suggestion(self) -> str:
        """Returns an addition to the fix of a collective that has failed."""
        ...

    def stuck_watch(self, *arguments: Any) -> Any:
        """Makes what a launcher does about ranks without progress; `launch/processes/standstill.py` has the arguments."""
        ...


@cache
def hang_reports() -> HangReports | None:
    """Returns the reports that are installed; None if none are."""
    return HANG_REPORTS.get(_NAME) if HANG_REPORTS.names() else None


def reports_for(is_asked: bool) -> HangReports | None:
    """Returns the reports that are installed.

    Args:
        is_asked: whether somebody has asked for them by a setting.

    Raises:
        ConfigError: `part-missing`, where none are installed and somebody has asked for them.
    """
    if is_asked:
        reports: HangReports = HANG_REPORTS.get(_NAME)
        return reports
    return hang_reports()


def suggestion() -> str:
    """Returns an addition to the fix of a collective that has failed: how to see what each rank does."""
    reports = hang_reports()
    return f"; {remedy()}" if reports is None else reports.suggestion()


def remedy() -> str:
    """Returns how reports are installed, for where there are none."""
    return f"`{how_to_install(extra_with(HANG_REPORTS.group, _NAME))}` adds reports of who waits for whom"
