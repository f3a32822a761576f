"""`profile`: torch's profiler with names instead of objects, and one trace file a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from paceline.base.errors import ConfigError
from paceline.config.keywords import checked_keywords


@checked_keywords
@contextmanager
def profile(
    *,
    activities: Sequence[str | ProfilerActivity] | None = None,
    schedule_option: Mapping[str, int] | None = None,
    on_trace_ready: Callable[[torch.profiler.profile], Any] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
    output_trace_dir: str | Path | None = None,
    rank: int = 0,
) -> Iterator[torch.profiler.profile]:
    """Profiles what runs inside the `with` block; nothing is communicated.

    Args:
        activities: "cpu", "cuda", "xpu", ... or torch's own members; all that this machine has where None.
        schedule_option: arguments of `torch.profiler.schedule` (wait, warmup, active, ...), in calls of `.step()`.
        on_trace_ready: called with the profiler each time that a schedule's cycle ends.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: as torch's.
        output_trace_dir: folder for `profile_{rank}.json`, for chrome://tracing or Perfetto; written on a clean end.
        rank: number of this process, for the file's name.

    Raises:
        ConfigError: `profile-activity`, for an activity that this machine lacks.

    Example:
        with profile(activities=["cpu"], output_trace_dir="traces") as prof:
            model(batch).sum().backward()
        print(prof.key_averages().table(sort_by="cpu_time_total", row_limit=5))
    """
    folder = Path(output_trace_dir) if output_trace_dir is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # before the work, so that a wrong path costs nothing
    with torch.profiler.profile(
        activities=_activities(activities),
        schedule=torch.profiler.schedule(**schedule_option) if schedule_option else None,
        on_trace_ready=on_trace_ready,
        record_shapes=record_shapes,
        profile_memory=profile_memory,
        with_stack=with_stack,
        with_flops=with_flops,
        with_modules=with_modules,
    ) as prof:
        yield prof
    if folder is not None:
        prof.export_chrome_trace(str(folder / f"profile_{rank}.json"))


def _activities(wanted: Sequence[str | ProfilerActivity] | None) -> list[ProfilerActivity] | None:
    if wanted is None:
        return None
    here = {activity.name.lower(): activity for activity in supported_activities()}
    names: list[str] = []
    for entry in wanted:
        name = entry if isinstance(entry, str) else entry.name
        names.append(name.lower())
    lacking = sorted(set(names) - set(here))
    if lacking:
        raise ConfigError(
            "profile-activity",
            f"the profiler cannot record {', '.join(lacking)} here.",
            why=f"activities = {names}; this machine has {', '.join(sorted(here))}",
            fix=f"profile(activities={sorted(set(names) & set(here)) or sorted(here)})",
        )
    return [here[name] for name in names]
