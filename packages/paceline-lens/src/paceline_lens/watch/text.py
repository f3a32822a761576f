"""`frame` shows a run on a terminal with rich: progress, curves, a coloured table of ranks and phases, findings, events.

`paceline watch --text` draws it again and again. `frame` is pure: it makes something that rich can draw from a snapshot and
the size of the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from paceline_lens.watch.finding import duration, median, size
from paceline_lens.watch.plain import (
    checkpoint_text,
    end_text,
    event_text,
    events_of,
    finding_text,
    number,
    speed_parts,
    step_text,
)

_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "✕"
_SHORT = {"forward": "fwd", "backward": "bwd", "pipeline": "pipe", "checkpoint": "save"}
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}
_STATES = {"starting": "cyan", "running": "green", "stuck": "bold red", "ended": "bold"}
# Backgrounds of cells, from a small share of the time to a large one. Time of the phases in `_COMPUTES` is grey; time of other
# phases is lost, and stands out.
_HEAT = (None, "grey11", "grey15", "grey19", "grey23", "grey30")
_LOST = (None, "#2b1a10", "#4a2a10", "#6b3a0c", "#8c4a08", "#b35c00")
_COMPUTES = ("forward", "backward", "step")
_FEWEST_ROWS = 4
_OTHER_LINES = 6  # the title, the head of the table, the line about further ranks, and empty lines
_MOST_FINDINGS = 6
_MOST_EVENTS = 4
_MOST_EVENT_LINES = 8


def frame(snapshot: Mapping[str, Any], width: int = 100, height: int = 40) -> RenderableType:
    """Returns a run as a terminal shows it.

    Args:
        snapshot: a snapshot of `RunView`.
        width, height: the size of the terminal, in characters. The table of ranks is cut so that the frame fits.
    """
    parts: list[Text] = [*_progress(snapshot, width), *_curves(snapshot, width)]
    findings = [_finding(finding) for finding in snapshot["findings"][:_MOST_FINDINGS]]
    events = _events(snapshot)
    lines = _OTHER_LINES + sum(_lines(text, width) for text in (*parts, *findings, *events))
    shown: list[RenderableType] = [*parts, Text(), *_ranks(snapshot, max(_FEWEST_ROWS, height - lines))]
    if findings:
        shown += [Text(), *findings]
    if events:
        shown += [Text(), *events]
    return Group(_title(snapshot), *shown)


def _lines(text: Text, width: int) -> int:
    """Returns how many lines of the terminal a text takes."""
    return sum(1 + len(line) // max(1, width) for line in text.plain.splitlines())


def sparkline(values: Sequence[float | str], width: int) -> str:
    """Returns values as bars of eight heights, the latest one at the right. A value that is not finite is a cross."""
    if len(values) > width:
        columns: list[float | str] = []
        for column in range(width):
            part = values[column * len(values) // width : (column + 1) * len(values) // width]
            not_finite = [value for value in part if isinstance(value, str)]
            # A column stands for several values. Its largest one is drawn, so that a short peak is not lost; and a value that
            # is not finite before any number.
            if not_finite:
                columns.append(not_finite[0])
            else:
                columns.append(max(part))
        values = columns
    finite = [value for value in values if not isinstance(value, str)]
    # Values are scaled by the largest one, since the difference of two huge numbers could be infinite.
    largest = max(map(abs, finite), default=1.0) or 1.0
    low = min(finite, default=0.0) / largest
    spread = max(finite, default=0.0) / largest - low
    bars = []
    for value in values:
        if isinstance(value, str):
            bars.append(_NOT_FINITE)
            continue
        height = 0
        if spread:
            height = int((value / largest - low) / spread * len(_BARS))
        bars.append(_BARS[min(height, len(_BARS) - 1)])
    return "".join(bars)


def _title(snapshot: Mapping[str, Any]) -> RenderableType:
    world = snapshot["world"]
    state = snapshot["state"]
    name = snapshot["name"] or snapshot["script"] or "run"
    processes = "1 process" if world["procs"] == 1 else f"{world['procs']} processes"
    if world["nodes"] > 1:
        processes += f" on {world['nodes']} hosts"
    size_and_time = f"  {processes}  {duration(snapshot['elapsed_s'])}"
    title = Text.assemble((name, "bold"), "  ", (state, _STATES[state]), size_and_time)
    if snapshot["restarts"]:
        title.append(f"  restarts: {snapshot['restarts']}", "yellow")
    return Rule(title, align="left", style="dim")


def _progress(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """Returns how far the run is and how fast it is, with a bar."""
    progress = snapshot["progress"]
    speed = snapshot["speed"]
    line = Text(step_text(progress))
    if progress["seconds_left"] is not None:
        line.append(f"  {duration(progress['seconds_left'])} left", "bold")
    if snapshot["state"] == "ended":
        style = "bold" if snapshot["exit_code"] == 0 else "bold red"
        line.append(f"  {end_text(snapshot)}", style)
    elif snapshot["state"] == "stuck":
        words = "no step yet"
        if snapshot["standing_s"] is not None:
            words = f"no step for {duration(snapshot['standing_s'])}"
        line.append(f"  {words}", "bold red")
    parts = [line]
    if progress["percent"] is not None:
        parts.append(_bar(progress["percent"] / 100, min(width, 100)))
    for name, rates in (("now", speed["recent"]), ("mean", speed["mean"]), ("plan", speed["forecast"])):
        speeds = speed_parts(rates)
        if speeds:
            parts.append(Text.assemble((f"{name:<5}", "dim"), "  ".join(speeds)))
    return parts


def _bar(share: float, width: int) -> Text:
    done = int(share * width)
    return Text.assemble(("━" * done, "cyan"), ("─" * (width - done), "dim"))


def _curves(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """Returns the curves of two losses, or of the first logged name, and of the gradient norm, each with its latest value."""
    series = snapshot["series"]
    others = [name for name in series if name not in ("grad_norm", "loss_scale", "skipped_steps")]
    losses = [name for name in others if "loss" in name]
    # The label and the latest value take 30 characters; 80 bars show what a terminal can show of a curve.
    names = losses[:2] or others[:1]
    if "grad_norm" in series:
        names.append("grad_norm")
    bar_width = max(10, min(80, width - 32))
    curves = []
    for name in names:
        values = [value for _, value in series[name]["points"]]
        last = series[name]["last"]
        label = name if len(name) <= 20 else f"{name[:19]}…"
        curve = Text.assemble((f"{label:<21}", "dim"), f"{number(last):<9}")
        colour = "red" if isinstance(last, str) else "cyan"  # a text stands for a value that is not finite
        curve.append(sparkline(values, bar_width), colour)
        curves.append(curve)
    scaler = []
    for name in ("loss_scale", "skipped_steps"):
        value = snapshot["latest"][name]
        if value:
            scaler.append(f"{name.replace('_', ' ')} {number(value)}")
    if scaler:
        curves.append(Text("  ".join(scaler), "dim"))
    return curves


# -- ranks and phases ----------------------------------------------------------------------------------------------


def _ranks(snapshot: Mapping[str, Any], rows: int) -> list[RenderableType]:
    """Returns the table with a row for each rank, and a column for each phase with its share of the recent time."""
    heat = snapshot["heat"]
    if not heat["ranks"]:
        return []
    used = []  # the columns of phases that took some time on some rank
    medians = []
    # `share` has a row for each rank. `zip` turns it, so that there is a tuple for each phase.
    for column, shares_of_phase in enumerate(zip(*heat["share"], strict=True)):
        medians.append(median(shares_of_phase))
        if max(shares_of_phase) > 0.001:
            used.append(column)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    several_hosts = len(snapshot["world"]["hosts"]) > 1
    table.add_column("rank", justify="right", no_wrap=True, min_width=4)
    if several_hosts:
        table.add_column("host", max_width=16, no_wrap=True)
    for column in used:
        phase = heat["phases"][column]
        label = _SHORT.get(phase, phase)
        table.add_column(label, justify="right", no_wrap=True, min_width=max(4, len(label)))
    table.add_column("ms", justify="right", no_wrap=True, min_width=4)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    shown = _shown_ranks(snapshot, rows)
    for place in shown:
        row = snapshot["ranks"][place]
        cells = [str(row["rank"])]
        if several_hosts:
            cells.append(row["host"])
        shares = heat["share"][place]
        share_cells = [_cell(heat["phases"][column], shares[column], medians[column]) for column in used]
        ms = heat["ms_per_step"][place]
        step_ms = "" if ms is None else f"{sum(ms):.0f}"
        table.add_row(*cells, *share_cells, step_ms, _memory(row), _where(row))
    parts: list[RenderableType] = [table]
    left_out = len(snapshot["ranks"]) - len(shown)
    if left_out:
        parts.append(Text(f"     and {left_out:,} more ranks; those of the findings come first", "dim"))
    return parts


def _shown_ranks(snapshot: Mapping[str, Any], rows: int) -> list[int]:
    """Returns the places of the rows that are shown. If not all fit, the ranks of findings come first."""
    place_of = {row["rank"]: place for place, row in enumerate(snapshot["ranks"])}
    places: dict[int, None] = {}  # an ordered set
    for finding in snapshot["findings"]:
        # A finding may name a rank that has not begun, which has no row.
        for rank in finding["ranks"]:
            if rank in place_of:
                places[place_of[rank]] = None
    places |= dict.fromkeys(place_of.values())
    # The first places are chosen in the order of importance, but shown in the order of ranks.
    return sorted(list(places)[:rows])


def _cell(phase: str, share: float, usual: float) -> Text:
    """Returns the cell of a share of the time. A larger share has a stronger colour.

    A share far above the usual one is also marked with ">", so that it can be seen without colours.
    """
    colours = _HEAT if phase in _COMPUTES else _LOST
    level = 0
    # One level for each tenth of the time, from 2 % on.
    if share > 0.02:
        level = min(len(colours) - 1, math.ceil(share * 10 - 0.2))
    is_above = share > usual + 0.1
    mark = ">" if is_above else ""
    # A terminal with a light background has dark letters, which could not be read on these backgrounds.
    style = Style(color="grey93" if level else None, bgcolor=colours[level], bold=is_above)
    return Text(f"{mark}{share:.0%}", style)


def _memory(row: Mapping[str, Any]) -> str:
    if not row["memory_peak"]:
        return ""
    if not row["memory_bytes"]:
        return size(row["memory_peak"])
    return f"{row['memory_peak'] / 1e9:.1f}/{row['memory_bytes'] / 1e9:.0f} GB"


def _where(row: Mapping[str, Any]) -> Text:
    """Returns where a rank is, if it is silent or has been in one phase for long."""
    if row["process"]:
        return Text(f"process {row['process']}", "bold red")
    if row["silent_s"] > 3:
        return Text(f"silent {duration(row['silent_s'])}", "red")
    if row["phase_s"] > 5:
        place = f" {row['at']}" if row["at"] else ""
        return Text(f"{row['phase']} {duration(row['phase_s'])}{place}", "yellow")
    return Text("")


# -- sentences -----------------------------------------------------------------------------------------------------


def _finding(finding: Mapping[str, Any]) -> Text:
    return Text(finding_text(finding), _COLOURS[finding["level"]])


def _events(snapshot: Mapping[str, Any]) -> list[Text]:
    """Returns the last checkpoint and the last events."""
    lines = []
    checkpoints = snapshot["checkpoints"]
    if checkpoints["last"]:
        last = checkpoints["last"][-1]
        counts = f"{checkpoints['count']} so far"
        if checkpoints["failed"]:
            counts += f"; {checkpoints['failed']} failed"
        lines.append(Text(f"{checkpoint_text(last)}, {duration(last['age_s'])} ago ({counts})"))
    events = [pair for pair in events_of(snapshot) if pair[0] != "checkpoints"]
    if snapshot["rounds"]:
        del events[0]  # the first round is the start of the run, which is no news
    events.sort(key=lambda pair: pair[1]["t"])
    for name, event in events[-_MOST_EVENTS:]:
        age = duration(max(0.0, snapshot["now"] - event["t"]))
        style = "red" if name in ("errors", "stuck") else ""
        text = event_text(name, event).splitlines()
        # A traceback would fill the terminal; the log has all of it.
        if len(text) > _MOST_EVENT_LINES:
            text[_MOST_EVENT_LINES - 1 :] = ["..."]
        lines.append(Text(f"{age} ago: " + "\n   ".join(text), style))
    return lines
