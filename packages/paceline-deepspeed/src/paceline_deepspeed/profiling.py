"""DeepSpeed's words for what our profiles measure (`observe/`): lines of the wall clock, and its summary of communication.

What differs, on purpose: a latency is that of one call, and the latency of the root is measured as that of other modules is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.config.given import Given
from paceline_deepspeed.flops_profiler import profile_text
from paceline_lens.observe.comms import Comms, size
from paceline_lens.observe.operations import Profile
from paceline_lens.observe.profiles import Profiles

if TYPE_CHECKING:
    from paceline_deepspeed.config import DeepSpeedConfig
    from paceline_deepspeed.engine_parts import Engine


def wall_clock_settings(config: DeepSpeedConfig) -> list[Given]:
    """Lists the setting that a config with a wall clock adds: the engine tells the times, so the core must not."""
    if not config["wall_clock_breakdown"]:
        return []
    return [Given("options.profile.wall_clock_every", 0, "code", config.places["wall_clock_breakdown"])]


class Timers:
    """Tells the times of its engine's micro-batches and steps, on the main process.

    Attributes:
        last: milliseconds by DeepSpeed's names, of the micro-batch and of the step that ended last.
    """

    def __init__(self, engine: Engine) -> None:
        global _latest
        self.last: dict[str, float] = {}
        self._engine = weakref.proxy(engine)
        self._profiles: Profiles | None = engine.accelerator.profiles
        self._before: dict[str, float] = {}
        if self._profiles is not None:
            _latest = weakref.ref(self._profiles)
            self._profiles.tell = _say
            if self._profiles.flops is not None:
                self._profiles.flops.words = self._words

    def after_step(self, boundary: bool) -> None:
        """Called by the engine at the end of each `step`."""
        if self._profiles is None or self._profiles.wall_clock is None:
            return
        # The clock counts from the beginning of the step, also over several micro-batches.
        of_step = self._profiles.wall_clock.now().phases
        of_micro_batch = {name: ms - self._before.get(name, 0.0) for name, ms in of_step.items()}
        self._before = {} if boundary else dict(of_step)
        due = [_deepspeed_times(of_micro_batch, "_microstep")]
        if boundary:
            due.append(_deepspeed_times(of_step, ""))
        for times in due:
            self.last.update(times)
            if self._engine.config["wall_clock_breakdown"] and self._engine.accelerator.is_main_process:
                cells = [f"{name}: {ms:.2f}" for name, ms in times.items()]
                _say("[Rank 0] time (ms) | " + " | ".join(cells))

    def values(self) -> list[tuple[str, float]]:
        """Lists what monitors get of the step that ended last."""
        names = {
            "forward": "fwd",
            "backward": "bwd",
            "backward_inner": "bwd_inner",
            "step": "step",
            "backward_allreduce": "bwd_allreduce",
        }
        values = []
        for word, name in names.items():
            if name in self.last:
                values.append((f"elapsed_time_ms_{word}", self.last[name]))
        return values

    def _words(self, profile: Profile) -> str:
        """Formats a profile of operations as the config asks for it."""
        config = self._engine.config
        batch = self._engine.batch
        world_size = self._engine.accelerator.num_processes
        run = {
            "world size": world_size,
            "data parallel size": batch.width,
            "model parallel size": world_size // batch.width,
            "batch size per GPU": batch.micro,
        }
        return profile_text(
            profile,
            step=profile.step - 1,  # as the config counts
            depth=config["flops_profiler.module_depth"],
            top=config["flops_profiler.top_modules"],
            detailed=config["flops_profiler.detailed"],
            run=run,
            samples=batch.train,
        )


def _deepspeed_times(ms: Mapping[str, float], suffix: str) -> dict[str, float]:
    """Renames our phases to DeepSpeed's; its backward pass includes the communication in it."""
    inner = ms.get("backward", 0.0)
    reduce = ms.get("reduce", 0.0)
    values = {
        "fwd": ms.get("forward", 0.0),
        "bwd": inner + reduce,
        "bwd_inner": inner,
        "bwd_allreduce": reduce,
        "step": ms.get("step", 0.0) + ms.get("clip", 0.0),
    }
    if ms.get("pipeline"):  # waiting for other stages, and talking to them
        values["pipe"] = ms["pipeline"]
    return {name + suffix: value for name, value in values.items()}


_say = partial(print, flush=True)


# -- communication -------------------------------------------------------------------------------------------------

# Profiles of the engine that was made last, because `deepspeed.comm` knows no engine; weak, so that an engine can be freed.
_latest: weakref.ref[Profiles] | None = None


def communication_log() -> Comms | None:
    """Returns the record of what is sent; None where nobody asked for it."""
    profiles = _latest() if _latest is not None else None
    return None if profiles is None else profiles.comms


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints, on rank 0, what was sent so far, by operation and size.

    Args:
        show_straggler: compares the ranks.
        return_dict: gives the numbers, on every rank.

    Ranks: all.
    """
    profiles = _latest() if _latest is not None else None
    if profiles is None or profiles.comms is None:
        return {"summary": {}} if return_dict else None
    # With `show_straggler` this gathers the latencies of all ranks, so it stands before anything that only one rank does.
    rows = profiles.comms.summary(show_straggler, profiles.collectives)
    if profiles.is_main:
        _say("\n".join(_summary(rows, show_straggler)))
    if not return_dict:
        return None
    report: dict[str, Any] = {"summary": {}}
    for row in rows:
        report["summary"].setdefault(row.op, {})[row.size_bytes] = {
            "count": row.count,
            "total_latency_ms": row.total_ms,
            "avg_latency_ms": row.mean_ms,
            "tput_avg_gbps": row.algbw_gbps,
            "busbw_avg_gbps": row.busbw_gbps,
            "msg_size_bytes": row.size_bytes,
            "msg_size_str": size(row.size_bytes),
        }
        if show_straggler:
            report.setdefault("straggler_analysis", {}).setdefault(row.op, {})[row.size_bytes] = {
                "count": row.count,
                "total_comm_lat_ms": row.total_ms - (row.straggler_ms or 0.0),
                "total_straggler_ms": row.straggler_ms,
            }
    return report


def _summary(rows: Iterable[Any], straggler: bool) -> list[str]:
    """Lists the lines of a table: the name of each operation, and below it a line for each size of its messages."""
    headings = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)"]
    headings.append("busbw_avg (Gbps)")
    if straggler:
        headings.append("Straggler(ms)")
    lines = [_table_line(headings)]
    op = ""
    for row in rows:
        if row.op != op:
            op = row.op
            lines.append(op)
        cells = ["", size(row.size_bytes), str(row.count), f"{row.total_ms:.2f}", f"{row.mean_ms:.2f}"]
        cells += [f"{row.algbw_gbps:.2f}", f"{row.busbw_gbps:.2f}"]
        if straggler:
            cells.append(f"{row.straggler_ms:.2f}")
        lines.append(_table_line(cells))
    return lines


def _table_line(cells: Iterable[str]) -> str:
    return "".join(f"{cell:<20}" for cell in cells).rstrip()
