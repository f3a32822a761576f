"""What the core asks of reports of hangs (`paceline.world.hang_reports`). Imports are late: launchers do not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from paceline.world.world import World
    from paceline_lens.hangs.debug import CallCheck
    from paceline_lens.hangs.progress_file import ProgressFile
    from paceline_lens.hangs.stuck import StuckWatch


def watch_waits(report_s: float, timeout_s: float | None, computes_on_cpu: bool) -> None:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import waits

    waits.watch(report_s, timeout_s, computes_on_cpu)


def watch_progress(world: World, stuck_after: str, computes_on_cpu: bool) -> ProgressFile | None:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import progress_file

    return progress_file.watch(world, stuck_after, computes_on_cpu)


def call_check(group: ProcessGroup, timeout_s: float | None, computes_on_cpu: bool) -> CallCheck:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs.debug import CallCheck

    return CallCheck(group, timeout_s, computes_on_cpu)


def backward_failed(error: BaseException) -> None:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import waits

    waits.backward_failed(error)


def backward_passed() -> None:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import waits

    waits.backward_passed()


def last_report(operation: str) -> list[str]:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import waits

    return waits.last_report(operation)


def suggestion() -> str:
    """See `paceline.world.hang_reports`."""
    from paceline_lens.hangs import debug

    return debug.suggestion()


def stuck_watch(*arguments: Any) -> StuckWatch:
    """See `paceline.launch.processes.standstill`."""
    from paceline_lens.hangs.stuck import StuckWatch

    return StuckWatch(*arguments)
