"""Writes the files that `paceline tune` leaves in its folder: results as they come, a table, the best settings, a picture.

results.jsonl            a line that says what was tuned, then one for each trial; an interrupted search continues from it
summary.txt              the table
best.yaml                the best candidate as settings of Paceline, for `paceline launch --config`
ds_config_optimal.json   the best as a config that scripts may bring (`script_config.py`), where a part serves such scripts
cmd_optimal.txt          the command that runs the best candidate
predicted.html           measured and predicted times

`cli/tune.py` gives `Results` to the `Tuner`, and calls `write` at the end of the search.
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
from paceline.base.text_table import text_table
from paceline.planner.estimate import gib
from paceline_lens.tune.charts import line_chart, page_style, plot_script
from paceline_lens.tune.script_config import has_script_configs, script_configs
from paceline_lens.tune.search import Candidate, Measured
from paceline_lens.tune.space import settings_of
from paceline_lens.tune.tuner import Task, Tuned, verdict

# The unit of each metric, and by what its score is multiplied. The score of a latency is negative seconds.
_UNITS = {"throughput": ("samples/s", 1.0), "latency": ("ms", -1e3), "flops": ("GFLOP/s", 1e-9)}

# Settings of the command `paceline tune` itself, which `best.yaml` must not hand to a launch.
_NOT_OF_THE_RUN = ("config", "dry_run", "module", "timeout_s", "options")


class Results:
    """The file `results.jsonl` of one tuning."""

    def __init__(self) -> None:
        self._path = Path()

    def open(self, task: Task, content: Mapping[str, Any] | None) -> dict[str, Measured]:
        """Opens the file, and returns what an earlier run of the same tuning measured, by the candidate's name.

        Raises:
            ConfigError: `tune-results`, if the folder holds the results of another tuning, or cannot be written to.
        """
        folder = Path(task.tuning.results_dir)
        self._path = folder / "results.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as error:
            raise ConfigError(
                "tune-results",
                f"the folder of results {folder} cannot be written to.",
                why=str(error.strerror or error),
                fix="name another folder: `--results FOLDER`",
            ) from None
        script = shlex.join(task.job.target.command)
        head = {"tuning": _fingerprint(task, content), "script": script, "procs": task.job.procs}
        lines: list[str] = []
        if self._path.exists() and not task.tuning.overwrite:
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A process that was killed may have left the last line incomplete.
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not rows:
            self._path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return {}
        if rows[0].get("tuning") != head["tuning"]:
            raise ConfigError(
                "tune-results",
                f"{folder} holds the results of another tuning.",
                why=[
                    f"there: {rows[0].get('script')}, {rows[0].get('procs')} processes",
                    f"now: {script}, {task.job.procs} processes, or with another script, config, device or metric",
                ],
                fix="start again with --overwrite, or choose another folder with --results",
            )
        complete_lines = [json.dumps(row) + "\n" for row in rows]
        self._path.write_text("".join(complete_lines), encoding="utf-8")
        # A candidate that was measured twice has two lines; the last one counts.
        return {row["name"]: Measured(**row["result"]) for row in rows[1:]}

    def add(self, candidate: Candidate, measured: Measured) -> None:
        """Appends one result."""
        row = {"name": candidate.name, "candidate": asdict(candidate), "result": asdict(measured)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _fingerprint(task: Task, content: Mapping[str, Any] | None) -> str:
    """Returns a hash of all that results depend on: the script, its config, the settings, the device, the measured steps."""
    job = task.job
    script = Path(job.target.name)
    source = str(script)
    if script.is_file():
        source = script.read_text(encoding="utf-8")
    # How far the search goes, and in which order, changes no result.
    tuning = {**asdict(task.tuning), "overwrite": 0, "trials": 0, "early_stop": 0, "order": ""}
    settings: list[tuple[str, str]] = []
    for choice in task.decisions:
        if choice.source != "default" and choice.field != "config":
            settings.append((choice.field, str(choice.value)))
    settings.sort()
    parts = [source, job.target.args, job.procs, tuning, settings, content, task.device.name]
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:16]


# -- the table -------------------------------------------------------------------------------------------------


def factor(tuned: Tuned) -> float:
    """Returns how many times as long as predicted a step takes: the median of the measured candidates."""
    ratios: list[float] = []
    for candidate in tuned.progress.measured:
        predicted = tuned.forecasts[candidate].seconds
        if predicted:
            ratios.append(tuned.progress.results[candidate].seconds / predicted)
    return median(ratios) if ratios else 1.0


def table(tuned: Tuned) -> str:
    """Returns the table of all candidates that were tried or not launched, with what is known of each."""
    scale = factor(tuned)
    rows = [["candidate", "predicted", "memory", "measured", "+-", "samples/s", "GFLOP/s", "took"]]
    statuses = ["status"]
    best, _ = tuned.progress.best()
    for candidate in [*tuned.progress.results, *tuned.left]:
        forecast = tuned.forecasts[candidate]
        predicted = ["", ""]
        if not forecast.problem:
            predicted = [f"{forecast.seconds * scale * 1e3:.1f} ms", gib(forecast.bytes)]
        result = tuned.progress.results.get(candidate)
        if result is None:
            rows.append([candidate.name, *predicted, "", "", "", "", ""])
            statuses.append(f"not launched: {verdict(tuned, candidate)}")
            continue
        measured = ["", "", "", ""]
        if result.status == "measured":
            rate = f"{result.batch / result.seconds:.1f}" if result.batch else ""
            flops = f"{forecast.flops / result.seconds / 1e9:.3g}" if forecast.flops else ""
            measured = [f"{result.seconds * 1e3:.1f} ms", f"{result.noise * 1e3:.1f}", rate, flops]
        rows.append([candidate.name, *predicted, *measured, f"{result.wall_s:.1f} s"])
        status = "best" if candidate == best else result.status
        if result.why and candidate != best:
            status = f"{result.status}: {result.why}"
        statuses.append(status)
    lines = text_table(rows, numbers=True)
    width = max(map(len, lines))
    with_status = [f"{line.ljust(width)}  {status}" for line, status in zip(lines, statuses, strict=True)]
    return "\n".join(with_status)


def _rates(tuned: Tuned) -> str:
    """Says which rates the predictions are based on."""
    calibration = tuned.task.calibration
    if calibration is None:
        return f"the datasheet's rates of {tuned.task.device.name}"
    return f"the rates that were measured here on {calibration.date}"


def summary(tuned: Tuned) -> str:
    """Returns the table, what was not varied, and which candidate is the best."""
    tuning = tuned.task.tuning
    device = tuned.task.device
    lines = [table(tuned), ""]
    for choice in tuned.space.closed:
        line = choice.field
        if choice.value is not None:
            line += f" stays {choice.value}"
        line += f": {choice.reason}"
        if choice.where:
            line += f" ({choice.where})"
        lines.append(line)
    best, equal = tuned.progress.best()
    assert best is not None, "a tuning without a result is an error"
    results = tuned.progress.results
    wall_s = median(result.wall_s for result in results.values())
    fitting = len(tuned.queue)
    lines.append(
        f"{len(results)} of the {fitting} that are predicted to fit were tried, {wall_s:.1f} s a trial; {tuned.why}"
    )
    if tuned.problem:
        lines.append(f"memory is without activations, as the rehearsal came to no step: {tuned.problem}")
    if tuned.again:
        lines.append(f"{tuned.again} were too close to tell apart and ran a second time; the faster trial counts")
    if tuned.reused:
        lines.append(f"{tuned.reused} of these results were there from an earlier run")
    lines.append(
        f"predicted: at {_rates(tuned)} x {factor(tuned):.3g}, the median of what was measured; "
        f"{gib(device.usable)} a rank can be used"
    )
    lines.append(f"best by {tuning.metric}: {best.name}, {_score(tuned, best)}")
    if equal:
        names = ", ".join(candidate.name for candidate in equal[:4])
        lines.append(f"as fast within noise, and not simpler: {names}")
    return "\n".join(lines)


def _score(tuned: Tuned, candidate: Candidate) -> str:
    """Says how good a measured candidate is, in the unit of the metric."""
    metric = tuned.task.tuning.metric
    result = tuned.progress.results[candidate]
    unit, scale = _UNITS[metric]
    if metric == "throughput" and not result.batch:
        unit = "steps/s"
    return f"{tuned.progress.score(candidate) * scale:.4g} {unit} ({result.seconds * 1e3:.1f} ms a step)"


# -- files -----------------------------------------------------------------------------------------------------


def write(tuned: Tuned) -> Path:
    """Writes everything but the results, which are written as they come; returns the folder."""
    best, _ = tuned.progress.best()
    assert best is not None, "a tuning without a result is an error"
    folder = Path(tuned.task.tuning.results_dir)
    text = summary(tuned)
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "best.yaml").write_text(best_yaml(tuned, best), encoding="utf-8")
    if has_script_configs():
        optimal = json.dumps(best_config(tuned, best), indent=2)
        (folder / script_configs().best_file).write_text(optimal + "\n", encoding="utf-8")
    (folder / "cmd_optimal.txt").write_text(command(tuned, best, folder) + "\n", encoding="utf-8")
    (folder / "predicted.html").write_text(picture(tuned), encoding="utf-8")
    return folder


def command(tuned: Tuned, best: Candidate, folder: Path) -> str:
    """Returns the command line that runs the best candidate."""
    job = tuned.task.job
    target = tuned.target(best)
    words = [target.name, *target.args]
    if target.kind == "module":
        words = ["-m", *words]
    if tuned.content is None:
        return shlex.join(["paceline", "launch", "--config", str(folder / "best.yaml"), *words])
    file = str(folder / script_configs().best_file)
    words = script_configs().with_file(words, file)
    is_read = any(word.endswith(file) for word in words)
    start = ["launch", "--procs", str(job.procs), "--compat", job.compat]
    if target.local_rank:
        start = script_configs().launch_command(job.procs)
    line = shlex.join(["paceline", *start, *words])
    if not is_read:
        line += f"  # once the script reads {file}: it names its config itself"
    return line


def best_yaml(tuned: Tuned, best: Candidate) -> str:
    """Returns the best candidate as a file of settings of Paceline, together with what the user decided."""
    import yaml

    task = tuned.task
    settings: dict[str, Any] = {"procs": task.job.procs}
    if task.job.compat:
        settings["compat"] = task.job.compat
    options: dict[str, dict[str, Any]] = {}
    for choice in task.decisions:
        if choice.source not in ("command line", "file") or choice.field in _NOT_OF_THE_RUN:
            continue
        if choice.field.startswith("options."):
            _, strategy, option = choice.field.split(".", 2)
            options.setdefault(strategy, {})[option] = choice.value
        else:
            settings[choice.field] = choice.value
    if tuned.content is None:
        settings |= settings_of(best, tuned.space, tuned.width)
        for name, value in best.options:
            strategy, _, option = name.partition(".")
            options.setdefault(strategy, {})[option] = value
    else:
        settings |= best.settings(tuned.width)
    if options:
        settings["options"] = options
    lines = [f"# {best.name}: {_score(tuned, best)} on {tuned.task.device.name}"]
    if tuned.content is not None:
        configs = script_configs()
        kind = configs.called[0].upper() + configs.called[1:]
        lines.append(f"# {kind} of the script's own wins over this: give it {configs.best_file}.")
    elif tuned.task.tuning.arguments:
        lines.append(f"# with {shlex.join(tuned.target(best).args)}")
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False)


def best_config(tuned: Tuned, best: Candidate) -> dict[str, Any]:
    """Returns the best candidate as a config of the kind that scripts may bring."""
    if tuned.content is not None:
        return script_configs().with_candidate(tuned.content, best, tuned.task.tuning.arguments)
    result = tuned.progress.results[best]
    micro = best.micro
    if not micro and result.batch:
        micro = result.batch // best.accumulate // tuned.width
    precision = "no"
    for choice in tuned.task.decisions:
        if choice.field == "mixed_precision":
            precision = str(choice.value)
    return script_configs().of_candidate(best, micro, precision)


def picture(tuned: Tuned) -> str:
    """Returns an HTML page, without references to other files, with the measured and predicted time of each trial."""
    scale = factor(tuned)
    measured: list[tuple[float, float]] = []
    predicted: list[tuple[float, float]] = []
    names = ""
    for number, candidate in enumerate(tuned.queue, 1):
        if candidate in tuned.progress.measured:
            measured.append((number, tuned.progress.results[candidate].seconds * 1e3))
            predicted.append((number, tuned.forecasts[candidate].seconds * scale * 1e3))
            names += f"<li value={number}>{candidate.name}</li>"
    chart = line_chart({"measured ms": measured, "predicted ms": predicted}, "trial")
    return (
        f"<!doctype html><meta charset=utf-8><title>Tuning</title><style>{page_style()}</style>"
        f"<body><h1>Measured against predicted</h1>{chart}<ol>{names}</ol>{plot_script()}</body>\n"
    )
