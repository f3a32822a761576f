"""What a tuning leaves in its folder: results as they come, a table, the best settings, a picture.

results.jsonl            a line that says what was tuned, then one for each trial; a search that was interrupted goes on from it
summary.txt              the table
best.yaml                the best in our settings, for `paceline launch --config`
ds_config_optimal.json   the best as a DeepSpeed config
cmd_optimal.txt          the command that runs it
predicted.html           measured against predicted time
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from paceline.base.errors import ConfigError
from paceline.observe.charts import line_chart
from paceline.planner.estimate import gib
from paceline.planner.script_config import script_configs
from paceline.planner.search import Candidate, Measured
from paceline.planner.tune import Task, Tuned, verdict
from paceline.planner.tune_space import settings_of

_UNITS = {"throughput": "samples/s", "latency": "ms", "flops": "GFLOP/s"}


class Results:
    """The file of results of one tuning."""

    _path = Path()

    def open(self, task: Task, content: Mapping[str, Any] | None) -> dict[str, Measured]:
        """Finds what an earlier run of the same tuning measured.

        Raises:
            ConfigError: `tune-results`, where the folder holds those of another one.
        """
        folder = Path(task.tuning.results_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        head = {"tuning": _mark(task, content), "script": shlex.join(task.job.target.command), "procs": task.job.procs}
        there = self._path.exists() and not task.tuning.overwrite
        lines = self._path.read_text(encoding="utf-8").splitlines() if there else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut off
        if not rows:
            self._path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return {}
        if rows[0].get("tuning") != head["tuning"]:
            raise ConfigError(
                "tune-results",
                f"{folder} holds the results of another tuning.",
                why=[f"there: {rows[0].get('script')}, {rows[0].get('procs')} processes", f"now: {head['script']}, "
                     f"{task.job.procs} processes, or with another script, config, device or metric"],
                fix="begin anew there with --overwrite, or name another folder with --results",
            )  # fmt: skip
        self._path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {row["name"]: Measured(**row["result"]) for row in rows[1:]}

    def add(self, candidate: Candidate, measured: Measured) -> None:
        """Writes one result."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"name": candidate.name, "candidate": asdict(candidate), "result": asdict(measured)}) + "\n"
            )


def _mark(task: Task, content: Mapping[str, Any] | None) -> str:
    """Changes where results could not be compared: another script, config, device or measurement."""
    script = Path(task.job.target.name)
    tuning = {**asdict(task.tuning), "overwrite": 0, "trials": 0, "early_stop": 0, "order": ""}
    told = [
        (each.field, str(each.value)) for each in task.decisions if each.source != "default" and each.field != "config"
    ]
    parts = [script.read_text(encoding="utf-8") if script.is_file() else str(script), task.job.target.args, task.job.procs,
             tuning, sorted(told), content, task.device.name]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:16]


# -- the table -------------------------------------------------------------------------------------------------


def factor(tuned: Tuned) -> float:
    """By how much steps take longer than at the datasheet's rates: the median of what was measured."""
    ratios = [
        seen.seconds / tuned.forecasts[each].seconds
        for each, seen in tuned.progress.results.items()
        if seen.status == "measured" and tuned.forecasts[each].seconds
    ]
    return median(ratios) if ratios else 1.0


def table(tuned: Tuned) -> str:
    """What was tried and what was not launched, and what is known of it."""
    scale = factor(tuned)
    head = ("candidate", "predicted", "memory", "measured", "+-", "samples/s", "GFLOP/s", "took", "status")
    rows: list[tuple[str, ...]] = [head]
    best, _ = tuned.progress.best()
    for each in [*tuned.progress.results, *tuned.left]:
        forecast, seen = tuned.forecasts[each], tuned.progress.results.get(each)
        predicted = "" if forecast.problem else f"{forecast.seconds * scale * 1e3:.1f} ms"
        memory = "" if forecast.problem else gib(forecast.bytes)
        if seen is None:
            rows.append((each.name, predicted, memory, "", "", "", "", "", f"not launched: {verdict(tuned, each)}"))
            continue
        numbers = ["", "", "", ""]
        if seen.status == "measured":
            rate = f"{seen.batch / seen.seconds:.1f}" if seen.batch else ""
            flops = f"{forecast.flops / seen.seconds / 1e9:.3g}" if forecast.flops else ""
            numbers = [f"{seen.seconds * 1e3:.1f} ms", f"{seen.noise * 1e3:.1f}", rate, flops]
        status = "best" if each == best else seen.status if not seen.why else f"{seen.status}: {seen.why}"
        rows.append((each.name, predicted, memory, *numbers, f"{seen.wall_s:.1f} s", status))
    widths = [max(len(row[at]) for row in rows) for at in range(len(head) - 1)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def summary(tuned: Tuned) -> str:
    """The table, what was not varied, and the verdict."""
    tuning, device = tuned.task.tuning, tuned.task.device
    lines = [table(tuned), ""]
    for each in tuned.space.closed:
        value = "" if each.value is None else f" stays {each.value}"
        lines.append(f"{each.field}{value}: {each.reason}{f' ({each.where})' if each.where else ''}")
    best, equal = tuned.progress.best()
    assert best is not None, "a tuning without a result is an error"
    seen = tuned.progress.results[best]
    tried, fit = len(tuned.progress.results), len(tuned.queue)
    wall = [each.wall_s for each in tuned.progress.results.values()]
    lines += [
        f"{tried} of the {fit} that are predicted to fit were tried, {median(wall):.1f} s a trial; {tuned.why}",
        f"predicted: at the datasheet's rates of {device.name} x {factor(tuned):.3g}, the median of what was measured; "
        f"{gib(device.usable)} a rank can be used",
        f"best by {tuning.metric}: {best.name}, {_said(tuned, best, seen)}",
    ]
    if tuned.problem:
        lines.insert(-2, f"memory is without activations, as the rehearsal came to no step: {tuned.problem}")
    if tuned.again:
        lines.insert(-2, f"{tuned.again} were too close to tell apart and ran a second time; the faster trial counts")
    if tuned.reused:
        lines.insert(-2, f"{tuned.reused} of these results were there from an earlier run")
    if equal:
        names = ", ".join(each.name for each in equal[:4])
        lines.append(f"as fast within noise, and not simpler: {names}")
    return "\n".join(lines)


def _said(tuned: Tuned, candidate: Candidate, seen: Measured) -> str:
    metric, value = tuned.task.tuning.metric, tuned.progress.score(candidate)
    shown = {"throughput": value, "latency": -value * 1e3, "flops": value / 1e9}[metric]
    unit = "steps/s" if metric == "throughput" and not seen.batch else _UNITS[metric]
    return f"{shown:.4g} {unit} ({seen.seconds * 1e3:.1f} ms a step)"


# -- files -----------------------------------------------------------------------------------------------------


def write(tuned: Tuned) -> Path:
    """Writes everything but the results, which are written as they come; returns the folder."""
    best, _ = tuned.progress.best()
    assert best is not None, "a tuning without a result is an error"
    folder = Path(tuned.task.tuning.results_dir)
    text = summary(tuned)
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "best.yaml").write_text(best_yaml(tuned, best), encoding="utf-8")
    optimal = json.dumps(best_config(tuned, best), indent=2)
    (folder / "ds_config_optimal.json").write_text(optimal + "\n", encoding="utf-8")
    (folder / "cmd_optimal.txt").write_text(command(tuned, best, folder) + "\n", encoding="utf-8")
    (folder / "predicted.html").write_text(picture(tuned), encoding="utf-8")
    return folder


def command(tuned: Tuned, best: Candidate, folder: Path) -> str:
    """What runs the best candidate."""
    job, target = tuned.task.job, tuned.target(best)
    words = [*(["-m"] if target.kind == "module" else []), target.name, *target.args]
    if tuned.content is None:
        return shlex.join(["paceline", "launch", "--config", str(folder / "best.yaml"), *words])
    file, taken = str(folder / "ds_config_optimal.json"), False
    for at, word in enumerate(words):
        if (
            word in ("--deepspeed_config", "--deepspeed")
            and words[at + 1 : at + 2]
            and not words[at + 1].startswith("-")
        ):
            words[at + 1], taken = file, True
        elif word.startswith("--deepspeed_config="):
            words[at], taken = f"--deepspeed_config={file}", True
    start = ["launch", "--procs", str(job.procs), "--compat", job.compat]
    if target.local_rank:
        start = ["deepspeed", "--num_gpus", str(job.procs)]
    note = "" if taken else f"  # once the script reads {file}: it names its config itself"
    return shlex.join(["paceline", *start, *words]) + note


def best_yaml(tuned: Tuned, best: Candidate) -> str:
    """The best in our settings."""
    import yaml

    task = tuned.task
    found: dict[str, Any] = {"procs": task.job.procs}
    if task.job.compat:
        found["compat"] = task.job.compat
    kept = [each for each in task.decisions if each.source in ("command line", "file")]
    found |= {each.field: each.value for each in kept if each.field not in ("config", "dry_run", "module", "timeout_s")}
    options: dict[str, dict[str, Any]] = {}
    for each in kept:
        if each.field.startswith("options."):
            del found[each.field]
            _, strategy, option = each.field.split(".", 2)
            options.setdefault(strategy, {})[option] = each.value
    found.pop("options", None)
    if tuned.content is None:
        for name, value in best.options:
            strategy, _, option = name.partition(".")
            options.setdefault(strategy, {})[option] = value
    found |= best.settings(tuned.width) if tuned.content is not None else settings_of(best, tuned.space, tuned.width)
    if options:
        found["options"] = options
    seen = tuned.progress.results[best]
    lines = [f"# {best.name}: {_said(tuned, best, seen)} on {tuned.task.device.name}"]
    if tuned.content is not None:
        lines.append("# A DeepSpeed config of the script's own wins over this: give it ds_config_optimal.json.")
    elif tuned.task.tuning.arguments:
        lines.append(f"# with {shlex.join(tuned.target(best).args)}")
    return "\n".join(lines) + "\n" + yaml.safe_dump(found, sort_keys=False)


def best_config(tuned: Tuned, best: Candidate) -> dict[str, Any]:
    """The best as the config of an engine."""
    if tuned.content is not None:
        return script_configs().with_candidate(tuned.content, best, tuned.task.tuning.arguments)
    seen = tuned.progress.results[best]
    micro = best.micro or (seen.batch // best.accumulate // tuned.width if seen.batch else None)
    precision = next((str(each.value) for each in tuned.task.decisions if each.field == "mixed_precision"), "no")
    return script_configs().of_candidate(best, micro, precision)


def picture(tuned: Tuned) -> str:
    """Measured and predicted time of each trial, as a page that needs nothing else."""
    measured = [
        (number, each)
        for number, each in enumerate(tuned.queue, 1)
        if (seen := tuned.progress.results.get(each)) and seen.status == "measured"
    ]
    scale = factor(tuned)
    chart = line_chart(
        {
            "measured ms": [(number, tuned.progress.results[each].seconds * 1e3) for number, each in measured],
            "predicted ms": [(number, tuned.forecasts[each].seconds * scale * 1e3) for number, each in measured],
        },
        "trial",
    )
    style = Path(line_chart.__code__.co_filename).with_name("report.css").read_text(encoding="utf-8")
    names = "".join(f"<li value={number}>{each.name}</li>" for number, each in measured)
    return (
        f"<!doctype html><meta charset=utf-8><title>Tuning</title><style>{style}</style>"
        f"<body><h1>Measured against predicted</h1>{chart}<ol>{names}</ol></body>\n"
    )
