"""Formats a snapshot of a run as plain lines: for the terminal, for logs of CI, and for the status line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline_lens.watch.finding import duration, milliseconds, numbered, size

_SIGNS = {"error": "!!", "warning": "!", "note": "-"}


def status(snapshot: Mapping[str, Any]) -> str:
    """Returns one line: how far the run is, how fast it is, and how long it will take."""
    progress = snapshot["progress"]
    state = snapshot["state"]
    if state == "starting":
        world = snapshot["world"]
        return f"starting: {world['heard']} of {world['procs']} ranks have begun, {duration(snapshot['elapsed_s'])}"
    parts = [step_text(progress)]
    if snapshot["latest"]["loss"] is not None:
        parts.append(f"loss {number(snapshot['latest']['loss'])}")
    if state != "ended":
        parts += speed_parts(snapshot["speed"]["recent"])
    if progress["seconds_left"] is not None:
        parts.append(f"{duration(progress['seconds_left'])} left")
    if state == "stuck":
        parts.insert(0, f"STUCK for {duration(snapshot['standing_s'] or snapshot['elapsed_s'])}")
    return ", ".join(parts)


def step_text(progress: Mapping[str, Any]) -> str:
    """Returns text such as "step 240 of 1,000 (24%)"."""
    if progress["total"] is None:
        return f"step {progress['step']:,}"
    return f"step {progress['step']:,} of {progress['total']:,} ({progress['percent']:.0f}%)"


def speed_parts(rates: Mapping[str, float | None]) -> list[str]:
    """Returns text such as "250 ms a step", "256 samples/s", "262k tokens/s", "MFU 48%": those that are known."""
    parts = []
    if rates["step_ms"] is not None:
        parts.append(f"{milliseconds(rates['step_ms'])} a step")
    for name in ("samples", "tokens"):
        rate = rates[f"{name}_per_s"]
        if rate is not None:
            parts.append(f"{number(rate)} {name}/s")
    if rates["mfu"] is not None:
        parts.append(f"MFU {rates['mfu']:.1%}")
    return parts


def number(value: float | str) -> str:
    """Returns a number in few characters: "0.0123", "1.23", "256", "262k", "3.1M"; "nan" and "inf" as they are."""
    if isinstance(value, str):
        return value
    for least, unit, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            digits = f"{value / unit:.3g}"
            if "e" in digits:  # from 1e15 on, which is 1e+03 T
                digits = f"{value / unit:.0f}"
            return f"{digits}{suffix}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


class PlainLog:
    """Returns lines about what is new in a run: its status every few seconds, and events at once.

    Args:
        interval_s: the seconds between two lines of status.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._next = 0.0
        # The time and the text of each event of the last snapshot.
        self._events_before: set[tuple[float, str]] = set()
        self._findings: dict[
            tuple[object, ...], str
        ] = {}  # the text of each finding that was shown, by what identifies it

    def lines(self, snapshot: Mapping[str, Any]) -> list[str]:
        """Returns the lines that this snapshot adds."""
        lines = [*self._events(snapshot), *self._changed_findings(snapshot)]
        now = float(snapshot["now"])
        if snapshot["state"] == "ended":
            lines += [status(snapshot), end_text(snapshot)]
        elif now >= self._next or lines:
            self._next = now + self._interval_s
            lines.insert(0, status(snapshot))
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        stamped = []
        for text in lines:
            stamped += [f"{clock} {line}" for line in text.splitlines()]
        return stamped

    def _events(self, snapshot: Mapping[str, Any]) -> Iterator[str]:
        # A new event may have an older time than those before it, because the clock of its host runs behind.
        before = self._events_before
        self._events_before = set()
        for name, event in events_of(snapshot):
            text = event_text(name, event)
            self._events_before.add((event["t"], text))
            if (event["t"], text) not in before:
                yield text

    def _changed_findings(self, snapshot: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line when a finding appears and when it is over, but not when only its numbers change."""
        findings: dict[tuple[object, ...], Mapping[str, Any]] = {}
        for finding in snapshot["findings"]:
            key = (finding["kind"], finding["evidence"].get("name"), *finding["ranks"])
            findings[key] = finding
        for key, finding in findings.items():
            if key not in self._findings:
                yield finding_text(finding)
        if snapshot["state"] != "ended":
            for key, text in self._findings.items():
                if key not in findings:
                    yield f"over: {text}"
        self._findings = {key: finding["text"] for key, finding in findings.items()}


def finding_text(finding: Mapping[str, Any]) -> str:
    """Returns a finding, with its fix on a second line."""
    text = f"{_SIGNS[finding['level']]} {finding['text']}"
    if finding["fix"]:
        text += f"\n   fix: {finding['fix']}"
    return text


def events_of(snapshot: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields all events: the key of such events in the snapshot, and the event."""
    for name in ("rounds", "checkpoints", "anomalies", "stuck", "errors"):
        events = snapshot[name]
        if name in ("checkpoints", "anomalies"):
            events = events["last"]  # these are counted too
        for event in events:
            yield name, event


def event_text(name: str, event: Mapping[str, Any]) -> str:
    """Returns an event as one or two lines of text.

    Args:
        name: the key of such events in the snapshot.
        event: the event.
    """
    if name == "rounds":
        return _round_text(event)
    if name == "checkpoints":
        return checkpoint_text(event)
    if name == "anomalies":
        return f"! step {event['step']}: {event['text'] or event['what']} ({event['action']})"
    if name == "stuck":
        report = f"\n   all stacks: {event['file']}" if event["file"] else ""
        return f"!! {event['text']}{report}"
    if event["rank"] is None:
        return f"!! {event['text']}"
    return f"!! {numbered([event['rank']])}: {event['text']}"


def _round_text(event: Mapping[str, Any]) -> str:
    text = f"{event['procs']} processes started"
    if event["number"] > 0:
        text += f" again (round {event['number']})"
    if event["nodes"] > 1:
        text += f" on {event['nodes']} hosts"
    parts = [text]
    if event["why"]:
        parts.append(event["why"])
    for name in ("lost", "joined"):
        if event[name]:
            parts.append(f"{name}: {', '.join(event[name])}")
    return "; ".join(parts)


def checkpoint_text(event: Mapping[str, Any]) -> str:
    """Returns text such as "checkpoint at step 240: 1.5 GB, the loop waited 0.2 s"."""
    if not event["ok"]:
        return f"!! the checkpoint at step {event['step']} was not written: {event['reason']}"
    parts = []
    if event["bytes"] is not None:
        parts.append(size(event["bytes"]))
    if event["stall_s"] is not None:
        parts.append(f"the loop waited {event['stall_s']:.1f} s")
    return f"checkpoint at step {event['step']}: {', '.join(parts) or event['path']}"


def end_text(snapshot: Mapping[str, Any]) -> str:
    """Says when and how the run has ended."""
    text = f"ended after {duration(snapshot['elapsed_s'])}"
    if snapshot["exit_code"] is not None:
        text += f" with exit code {snapshot['exit_code']}"
    if snapshot["why"]:
        text += f": {snapshot['why']}"
    return text
