"""Reports a rehearsal: `text` for people, `as_json` for programs. What others have published stands beside the forecast."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.base.text_table import text_table
from paceline_lens.rehearse.intervals import SLOWER
from paceline_lens.rehearse.measure import Recovery
from paceline_lens.rehearse.rehearsal import RehearsalResult

# 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA_3_DEVICE_HOURS = 54 * 24 * 16_384 / 419


@dataclass(frozen=True)
class PublishedReliability:
    """What somebody has published of one size.

    Attributes:
        devices: their number.
        mtbf_h: hours between two failures.
        useful: share of the time, as it was published; "" where it was not.
        source: a key of `SOURCES`.
        how: whether it was measured or projected.
    """

    devices: int
    mtbf_h: float
    useful: str
    source: str
    how: str


SOURCES = {
    "Llama 3": "The Llama 3 Herd of Models (Meta, 2024): 466 interruptions of the job in 54 days, 419 of them unexpected",
    # The figures of this study were not looked up for this table.
    "RSC-1": "Revisiting Reliability in Large-Scale Machine Learning Research Clusters (Meta, HPCA 2025); quoted from memory",
}
PUBLISHED = (
    PublishedReliability(1_024, 7.9, "", "RSC-1", "measured"),
    PublishedReliability(16_384, 54 * 24 / 419, "> 90%", "Llama 3", "measured"),
    PublishedReliability(16_384, 1.8, "", "RSC-1", "projected"),
    PublishedReliability(131_072, 0.23, "", "RSC-1", "projected"),
)

_PARTS = {
    "detected": "detect_s",
    "started": "start_s",
    "imports": "import_s",
    "script": "build_s",
    "prepare": "prepare_s",
    "load": "load_s",
    "first step": "first_step_s",
    "recovery": "recovery_s",
    "new step": "new_step_s",
}


def text(result: RehearsalResult) -> str:
    """Returns the report as a person reads it."""
    lines = [_alone(result), "", *_table(result.recoveries), ""]
    for each in result.recoveries:
        lines += _details(each)
    for name, why in result.skipped.items():
        lines += [f"{name}: NOT REHEARSED", f"  {why}", ""]
    if result.proposed is None:
        lines += ["No settings are proposed: no recovery from a killed rank or host was measured.", ""]
    else:
        lines += [*_proposals(result), "", *_sizes(result), ""]
    passed = sum(each.passed for each in result.recoveries)
    lines.append(
        f"{len(result.recoveries)} failures rehearsed: {passed} survived, {len(result.skipped)} not rehearsed."
    )
    return "\n".join(lines)


def _alone(result: RehearsalResult) -> str:
    reference = result.reference
    plural = "es" * (reference.ranks > 1)
    size = "" if reference.bytes is None else f", {reference.bytes / 1e6:,.1f} MB"
    every = "" if reference.save_steps is None else f" every {reference.save_steps} steps"
    return (
        f"Without a failure: {reference.steps} steps on {reference.ranks} process{plural}, {_seconds(reference.step_s)} each. "
        f"A save{every} keeps them waiting for {_seconds(reference.stall_s)}, and takes {_seconds(reference.save_s)}{size}."
    )


def _table(recoveries: Sequence[Recovery]) -> list[str]:
    """Returns a row for each drill. Times are seconds; the first seven make up the recovery."""
    if not recoveries:
        return []
    rows = [["failure", "at step", *_PARTS, "twice", "losses", "verdict"]]
    for each in recoveries:
        times = [_number(getattr(each, name)) for name in _PARTS.values()]
        verdict = "survived" if each.passed else "NOT SURVIVED"
        rows.append([each.failure, str(each.step), *times, _twice(each), _losses(each), verdict])
    lines = text_table(rows)
    return [
        "Seconds after each failure, in the process of the first rank:",
        "",
        lines[0],
        "-" * max(map(len, lines)),
        *lines[1:],
    ]


def _twice(each: Recovery) -> str:
    steps = f"{each.steps_twice} step{'s' * (each.steps_twice != 1)}"
    return steps if not each.samples_twice else f"{steps}, {each.samples_twice} samples"


def _losses(each: Recovery) -> str:
    if not each.compared:
        return "not known"
    if each.change is None:
        return "exact"
    return "not reproducible" if each.changes_before else f"differ at step {each.change.step}"


def _details(each: Recovery) -> list[str]:
    lines = []
    if not each.survived:
        lines = [f"{each.failure}: NOT SURVIVED ({each.what}, after step {each.step}, rank {each.rank})"]
        lines += [f"  {line}" for line in each.why.splitlines()]
        lines.append(f"  fix: {each.fix}")
    elif each.change is not None:
        change = each.change
        lines = [
            f"{each.failure}: the loss of step {change.step} on rank {change.rank} is {change.loss:.9g} in place of "
            f"{change.expected:.9g}"
        ]
        fix = "register what the loop needs beside model, optimizer and loader: `accelerator.register_for_checkpointing(...)`"
        if each.changes_before:
            lines.append("  it was computed before the failure: two runs of this script differ by themselves")
            fix = "`paceline verify` names what differs"
        lines.append(f"  fix: {fix}")
    return [*lines, ""] if lines else []


def _proposals(result: RehearsalResult) -> list[str]:
    proposed, costs, reference = result.proposed, result.costs, result.reference
    assert proposed is not None and costs is not None
    found = any(each.failure == "hang" and each.passed for each in result.recoveries)
    timeout = f"three times the longest silence of a process ({_seconds(reference.silence_s)}), at least 10 s"
    rows = [
        [f"--timeout-s {proposed.timeout_s:g}", timeout + "; the hang was found with it" * found],
        [
            f"--max-restarts {proposed.max_restarts}",
            "as many failures as a week has, and three standard deviations more",
        ],
        [f"--grace-s {proposed.grace_s:g}", "three times what a save at SIGTERM took, at least 30 s"],
        [
            f"save every {proposed.save_steps:,} steps",
            f"{_seconds(proposed.save_every_s)} by Daly; {_seconds(result.sizes[0].young_s)} by Young",
        ],
    ]
    settings = [word for row in rows[:3] for word in row[0].split()]
    options = _without(result.job.options, ("--timeout-s", "--max-restarts", "--grace-s"))
    module = ["-m"] if result.job.kind == "module" else []
    command = ["paceline", "launch", *options, *settings, *module, result.job.script, *result.job.args]
    return [
        f"Proposed for {proposed.devices:,} devices:",
        "",
        *text_table(rows, indent="  "),
        "",
        f"  {shlex.join(command)}",
        f"  if step % {proposed.save_steps} == 0: accelerator.save_state()",
    ]


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns words of a command line without some flags and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in flags:
            kept.append(word)
        skip = not skip and word in flags
    return kept


def _sizes(result: RehearsalResult) -> list[str]:
    costs = result.costs
    assert costs is not None
    rows = [
        ["devices", "failures a day", "between two", "save every", "useful time", f"if {SLOWER:g}x slower", "source"]
    ]
    for size in result.sizes:
        every = f"{_seconds(size.daly_s)} ({size.steps:,} steps)"
        shares = [f"{size.useful:.2%}", f"{size.useful_slower:.2%}"]
        between = _seconds(size.mtbf_s)
        rows.append([f"{size.devices:,}", f"{size.failures_per_day:,.1f}", between, every, *shares, "forecast"])
    for known in PUBLISHED:
        row = [f"{known.devices:,}", f"{24 / known.mtbf_h:,.1f}", _seconds(known.mtbf_h * 3600), "", known.useful, ""]
        rows.append([*row, f"{known.source}, {known.how}"])
    device_years = result.sizes[0].mtbf_s * result.sizes[0].devices / 86400 / 365
    return [
        "Forecast of the useful time, beside what others have published:",
        "",
        *text_table(rows, indent="  "),
        "",
        *(f"  {name}: {source}." for name, source in SOURCES.items()),
        "",
        "  Assumptions:",
        f"  - A device fails once in {device_years:.2g} years (--mtbf-hours), independently of all others and of time.",
        f"  - A failure costs a recovery of {_seconds(costs.recovery_s)}, and what was computed since the last complete save.",
        f"  - A save costs {_seconds(costs.save_s)}, and is complete {_seconds(costs.late_s)} later.",
        "  - All of this is the same at every number of devices. In the column with 'slower', saves and recoveries are slower.",
        "  - The wait for a new host, and failures that are seen only by --timeout-s, come on top.",
    ]


def as_json(result: RehearsalResult) -> dict[str, Any]:
    """The same for programs."""
    reference = asdict(result.reference)
    del reference["losses"], reference["samples"]  # one for each step
    return {
        "exit_code": result.exit_code,
        "without_failure": reference,
        "failures": [{**asdict(each), "passed": each.passed} for each in result.recoveries],
        "not_rehearsed": result.skipped,
        "costs": None if result.costs is None else asdict(result.costs),
        "proposed": None if result.proposed is None else asdict(result.proposed),
        "forecast": [asdict(size) for size in result.sizes],
        "published": [{**asdict(known), "source": SOURCES[known.source]} for known in PUBLISHED],
    }


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _seconds(seconds: float) -> str:
    """Returns a time in the unit in which it is easiest to read."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.1f} h"
