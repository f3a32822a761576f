"""`Tuner`: the search for a plan by short runs of the user's own script.

    warm up     torch and what the script imports are loaded once; nothing here touches a device or starts a thread
    rehearse    the script on tensors without values, at one or two micro-batches: bytes, arithmetic, what is left open
    forecast    each candidate's bytes and least time, by formulas; what does not fit is not launched
    trial       forked processes form a group, run the script to its measured steps, and end; whatever befalls them
    best        of those as fast as the fastest, the simplest

A fork of a warm process costs milliseconds, where a new interpreter costs its imports, and an out-of-memory, a crash or a
hang of a trial ends with its processes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import PacelineError, PlanError
from paceline.base.temporary import temporary_folder
from paceline.config.given import Choice
from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline.launch.launcher import Outcome
from paceline.planner.estimate import gib
from paceline_lens.forecast.calibration import Calibration
from paceline_lens.forecast.device import Device
from paceline_lens.forecast.rehearsal import ChildError, Rehearsal, SimulatedWorld, in_child, rehearse
from paceline_lens.own_runs import handed, run_here
from paceline_lens.tune.forecast import Forecaster
from paceline_lens.tune.script_config import script_configs
from paceline_lens.tune.search import Candidate, Forecast, Measured, SearchProgress, Space, Tuning, sort_out
from paceline_lens.tune.space import rows_of, settings_of, space_of
from paceline_lens.tune.trial import ScriptNotes, Trial

# A trial must begin from the start and must not write a profile, whatever the run itself does.
_NOT_OF_TRIALS = ("resume", "profile")
# So many equal failures in a row, before any trial was measured, show that the script fails and not the candidates.
_SAME_FAILURES = 3
_UNMOVED = {"offload": "no"}


@dataclass(frozen=True)
class Task:
    """What is to be tuned.

    Attributes:
        job: the processes, as for a launch; its target is the script.
        decisions: what the command line and files say about the run.
        tuning: the settings of the search. If the script brings a config, its settings take their place, except for `said`.
        said: the attributes of `tuning` that the command line gave.
        device: the device that the ranks run on.
        limit_s: seconds that a trial may go without a step.
        calibration: the calibration of this machine; None predicts times at the datasheet's rates.
    """

    job: Job
    decisions: tuple[Choice, ...]
    tuning: Tuning
    said: Mapping[str, Any]
    device: Device
    limit_s: float
    calibration: Calibration | None = None


@dataclass
class Tuned:
    """The result of a search.

    Attributes:
        task: what was tuned, with the settings that the search followed.
        width: ranks that read different samples.
        space: what was varied, and what was not.
        forecasts: the forecasts of all candidates.
        queue, left: the candidates to launch, in order; and those that were not launched.
        progress: what was measured.
        content: the config that the script brings (`script_config.py`); None if it brings none.
        why: why no more trials were run.
        reused: how many results come from an earlier run.
        again: how many candidates were measured a second time, since they were too close to the fastest one.
        problem: why a rehearsal did not reach an optimizer step; "" if it did.
    """

    task: Task
    width: int
    space: Space
    forecasts: dict[Candidate, Forecast]
    queue: list[Candidate]
    left: list[Candidate]
    progress: SearchProgress
    content: dict[str, Any] | None = None
    why: str = ""
    reused: int = 0
    again: int = 0
    problem: str = ""

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """Returns a candidate as settings of Paceline, without those that the script or the command line decides."""
        return settings_of(candidate, self.space, self.width)

    def target(self, candidate: Candidate) -> Target:
        """Returns the script with the arguments of a candidate."""
        return with_arguments(self.task.job.target, candidate, self.task.tuning.arguments)


class Tuner:
    """Runs a search.

    Args:
        task: what to tune.
        tell: called after each trial with the search so far, the candidate, and a note about where its result comes from.
        earlier: returns the results of an earlier run of the same tuning, by the candidate's name. It is called after the
            rehearsals, since only they tell what is tuned.
        keep: writes one result to a file.
    """

    def __init__(
        self,
        task: Task,
        tell: Callable[[Tuned, Candidate, str], None],
        earlier: Callable[[Task, Mapping[str, Any] | None], Mapping[str, Measured]],
        keep: Callable[[Candidate, Measured], None],
    ) -> None:
        self.task = task
        self._tell = tell
        self._earlier = earlier
        self._keep = keep
        self.first_failure = ""

    def run(self) -> Tuned:
        """Runs the whole search.

        Raises:
            PlanError: `tune-none`, if nothing could be measured; `plan-rehearsal`; `tune-steps`.
        """
        # Forked rehearsals and trials inherit these imports.
        _import(["torch", "paceline.torch_internals.compiler", "paceline.accelerator"])
        with tempfile.TemporaryDirectory(prefix="paceline-tune-", dir=temporary_folder()) as folder:
            self._folder = Path(folder)
            tuned = self._look()
            # A garbage collection writes to the header of each object that it visits, so that a forked process would copy
            # the memory that it shares with this one. Frozen objects are not visited.
            gc.collect()
            gc.freeze()
            earlier = self._earlier(tuned.task, tuned.content)
            try:
                self._search(tuned, earlier)
            finally:
                gc.unfreeze()
        if tuned.progress.leader is None:
            raise self._nothing_measured(tuned)
        return tuned

    # -- before the first trial ------------------------------------------------------------------------------

    def _look(self) -> Tuned:
        """Rehearses the script, and makes the candidates and their forecasts."""
        # The first rehearsal runs the script as it is; it shows which config and modules it brings and what may be varied.
        rehearsal, notes = self._rehearse(None)
        # The config of a script may hold settings of the search. Those of the command line win over them.
        content = notes.get("config")
        config = None
        if content is not None:
            config = script_configs().read(content)
            self.task = replace(self.task, tuning=config.tuning(self.task.said))
        _load(notes.get("modules", ()))
        layout = rehearsal.plan.layout
        width = layout.size("replicate", "shard")
        space = space_of(rehearsal, notes, config, self.task.tuning, self.task.decisions, width)
        task = self.task
        forecaster = Forecaster.of(rehearsal, rows_of(notes), task.device, task.job.procs, task.calibration)
        # One rehearsal cannot tell which bytes and operations grow with the micro-batch. A second one of another size does.
        other = _of_other_rows(space.candidates(), forecaster.rows)
        if other is not None and other.micro is not None:
            second_rehearsal, notes = self._rehearse(replace(other, accumulate=rehearsal.plan.accumulate))
            rows = rows_of(notes)
            if rows == other.micro:
                forecaster = forecaster.with_second(second_rehearsal, other.micro)
            else:
                # The script ignores the micro-batch that it is given, so that there is none to vary.
                why = f"the script feeds {rows} samples where {other.micro} were asked for"
                closed = (*space.closed, Choice("micro", forecaster.rows, reason=why))
                space = replace(space, micro=((None, rehearsal.plan.accumulate),), closed=closed)
        candidates = space.candidates()
        forecasts: dict[Candidate, Forecast] = {}
        for candidate in candidates:
            forecasts[candidate] = forecaster.forecast(candidate, settings_of(candidate, space, width))
        queue, left = sort_out(candidates, forecasts, self.task.device.usable, self.task.tuning)
        flops = {candidate: forecasts[candidate].flops for candidate in candidates}
        progress = SearchProgress(self.task.tuning, flops)
        return Tuned(self.task, width, space, forecasts, queue, left, progress, content, problem=rehearsal.problem)

    def _rehearse(self, candidate: Candidate | None) -> tuple[Rehearsal, dict[str, Any]]:
        """Rehearses the script as it is, or with the micro-batch of a candidate; returns also the notes of the script."""
        job = self.task.job
        path = self._folder / "notes.json"
        target = job.target
        if candidate is not None:
            target = with_arguments(target, candidate, self.task.tuning.arguments)
        simulated = SimulatedWorld(
            world_size=job.procs,
            local_size=job.procs,
            settings=_of_trial(self.task.decisions, _UNMOVED if _is_open(self.task.decisions) else {}),
            accelerated=not self.task.device.name.startswith("cpu"),
            compat=job.compat,
            memory=self.task.device.usable,
        )
        notes = ScriptNotes(partial(_changed, candidate=candidate, arguments=self.task.tuning.arguments))
        # The rehearsal runs in a forked process, so that the notes come back through a file.
        rehearsal = rehearse(partial(notes.watch, target.on(0), job.compat, path), simulated, notes)
        return rehearsal, json.loads(path.read_text(encoding="utf-8"))

    # -- trials ----------------------------------------------------------------------------------------------

    def _search(self, tuned: Tuned, earlier: Mapping[str, Measured]) -> None:
        """Runs the trials of the queue until the search is over, then the best ones a second time."""
        failures: list[str] = []  # the failures since the last trial that did not fail
        for candidate in tuned.queue:
            if candidate.name in earlier:
                measured = earlier[candidate.name]
                tuned.reused += 1
            else:
                measured = self._try(tuned, candidate)
                self._keep(candidate, measured)
            tuned.progress.add(candidate, measured)
            origin = "from an earlier run" if candidate.name in earlier else ""
            self._tell(tuned, candidate, origin)
            tuned.why = tuned.progress.done
            if measured.status != "failed":
                failures.clear()
            else:
                failures.append(measured.why)
                failed_alike = failures[-_SAME_FAILURES:] == [measured.why] * _SAME_FAILURES
                if failed_alike and tuned.progress.leader is None:
                    tuned.why = f"{_SAME_FAILURES} trials failed alike, and none was measured"
            if tuned.why:
                break
        tuned.why = tuned.why or "all that fit were tried"
        for candidate in tuned.progress.contenders():
            if tuned.progress.results[candidate].trials > 1:
                continue  # an earlier run has measured it a second time
            measured = self._try(tuned, candidate)
            self._keep(candidate, tuned.progress.again(candidate, measured))
            tuned.again += 1
            self._tell(tuned, candidate, "again")

    def _try(self, tuned: Tuned, candidate: Candidate) -> Measured:
        """Runs one trial in processes that are forked from this one, and waits until they end."""
        task = self.task
        tuning = task.tuning
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        # A config that the script brings carries the candidate's values itself (see below). Without one, the processes get
        # them as settings.
        settings: dict[str, Any] = {}
        if tuned.content is None:
            settings = tuned.settings(candidate) | {f"options.{name}": value for name, value in candidate.options}
        # A device refuses to allocate more than it has. Host memory is not limited by itself, so a trial gets a limit.
        memory = task.device.memory if task.device.name.startswith("cpu") else 0
        change = partial(_changed, candidate=candidate, arguments=tuning.arguments)
        trial = Trial(folder, tuning.first_step, tuning.last_step, task.limit_s, memory, change)
        target = tuned.target(candidate)
        log_dir = Path(tuning.exps_dir) / candidate.name
        job = replace(
            task.job,
            target=Target("function", target.name, target.args, partial(trial.run, target, task.job.compat)),
            env={**task.job.env, **_of_trial(task.decisions, settings)},
            start="fork",
            max_restarts=0,
            log_dir=str(log_dir),
        )
        log_dir.mkdir(parents=True, exist_ok=True)
        # An earlier search may have left its output there.
        for path in log_dir.glob("rank*"):
            path.unlink()
        if tuned.content is not None:
            content = script_configs().with_candidate(tuned.content, candidate, tuning.arguments)
            path = log_dir / script_configs().trial_file
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # A process that the out-of-memory killer ended looks like any other that got SIGKILL: only the system's count tells.
        killed_before = _killed_by_system()
        began = time.monotonic()
        outcome = run_here(job)
        wall_s = time.monotonic() - began
        measured = self._judge(folder, job, outcome, _killed_by_system() > killed_before, candidate, tuned.width)
        return replace(measured, wall_s=wall_s)

    def _judge(
        self, folder: Path, job: Job, outcome: Outcome, killed: bool, candidate: Candidate, width: int
    ) -> Measured:
        """Turns what the processes of a trial left in its folder into a result."""
        # The order matters: a rank without memory makes the others fail or hang too, so that its report counts first.
        failure = outcome.failure
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        for report in reports:
            if report["status"] == "does not fit":
                return Measured("does not fit", why=str(report["why"]))
        if failure is not None and failure.code == -signal.SIGKILL and killed:
            return Measured("does not fit", why="the system killed a process for want of memory")
        # A rank that went too long without a step has written where it stood.
        for stack in sorted(folder.glob("rank*.stack")):
            if stack.stat().st_size:
                self._note_failure(stack.read_text())
                return Measured("failed", why=f"no step within {self.task.limit_s:g} s")
        if failure is not None:
            problem = problem_of(outcome, job)
            self._note_failure(failure.report or f"{problem.what} See {job.log_dir}.")
            lines = failure.report.strip().splitlines() or [problem.what]
            # The last line of a traceback names the exception. Errors of Paceline have more lines after the one that does.
            paceline_errors = [line for line in lines if line.startswith("paceline.")]
            return Measured("failed", why=(paceline_errors or lines[-1:])[0])
        all_measured = all(report["status"] == "measured" for report in reports)
        if len(reports) < job.procs or not all_measured:
            done = min((report["done"] for report in reports), default=0)
            tuning = self.task.tuning
            why = f"the script ended after {done} steps; steps {tuning.first_step} to {tuning.last_step} are measured"
            return Measured("failed", why=why)
        rows = reports[0].get("rows")
        if candidate.micro is not None and rows not in (None, candidate.micro):
            return Measured("failed", why=f"the script feeds {rows} samples where {candidate.micro} were asked for")
        # All ranks wait for the slowest one, so that its steps are those of the run.
        slowest = max((report["steps"] for report in reports), key=statistics.median)
        seconds = statistics.median(slowest)
        noise = statistics.median(abs(step - seconds) for step in slowest)
        batch = candidate.batch(width) or reports[0].get("batch")
        peak_bytes = max(report["bytes"] for report in reports)
        return Measured("measured", seconds, noise, batch, peak_bytes)

    def _note_failure(self, report: str) -> None:
        self.first_failure = self.first_failure or report.rstrip()

    def _nothing_measured(self, tuned: Tuned) -> PacelineError:
        results = tuned.progress.results
        failures = [f"{candidate.name}: {result.why}" for candidate, result in results.items()]
        # Four examples are enough for an error.
        why = failures[:4]
        for candidate in tuned.left[: 4 - len(why)]:
            why.append(f"{candidate.name} was not launched: {verdict(tuned, candidate)}")
        if results and all("steps" in result.why and result.status == "failed" for result in results.values()):
            fix = "let the script take more optimizer steps, or measure earlier ones: --first-step 2 --last-step 3"
            return PlanError("tune-steps", "the script ends before the steps that are measured.", why, fix)
        fix = "see that the script trains under `paceline launch`; where memory does not suffice, use more processes"
        return PlanError("tune-none", "no candidate could be measured.", why, fix)


def _of_other_rows(candidates: Sequence[Candidate], rows: int | None) -> Candidate | None:
    """Returns the first candidate with another micro-batch than the `rows` of the first rehearsal; None if there is none."""
    for candidate in candidates:
        if rows is not None and candidate.micro is not None and candidate.micro != rows:
            return candidate
    return None


def verdict(tuned: Tuned, candidate: Candidate) -> str:
    """Says why a candidate was not launched."""
    forecast = tuned.forecasts[candidate]
    device = tuned.task.device
    if forecast.problem:
        return forecast.problem
    return f"needs {gib(forecast.bytes)} a rank, {gib(device.usable)} of {device.name} can be used"


def with_arguments(target: Target, candidate: Candidate, arguments: Mapping[str, str]) -> Target:
    """Returns the script with the candidate's values in those of its arguments that `arguments` names."""
    words = list(target.args)
    for name, flag in arguments.items():
        value = candidate.micro if name == "micro" else candidate.accumulate
        if value is not None:
            _set_argument(words, flag, str(value))
    return replace(target, args=tuple(words))


def _set_argument(words: list[str], flag: str, value: str) -> None:
    """Sets the value of a flag among a script's arguments, in place; adds the flag if it is not there."""
    # If a flag is given twice, argparse takes the last one.
    for number in reversed(range(len(words))):
        word = words[number]
        if word.startswith(f"{flag}="):
            words[number] = f"{flag}={value}"
            return
        if word == flag:
            following = words[number + 1 : number + 2]
            # A flag whose value is optional may stand alone: the next word is then another flag, and must stay.
            has_value = bool(following) and not following[0].startswith("-")
            words[number + 1 : number + 1 + has_value] = [value]
            return
    words += [flag, value]


def _changed(
    content: Mapping[str, Any], candidate: Candidate | None, arguments: Mapping[str, str]
) -> Mapping[str, Any]:
    if candidate is not None:
        content = script_configs().with_candidate(content, candidate, arguments)
    return script_configs().plain(content)


def _is_open(decisions: Sequence[Choice]) -> bool:
    """Returns whether the search chooses `offload`, so that a rehearsal must show what is needed without it."""
    return any(choice.field == "offload" and str(choice.value).partition("=")[0] == "auto" for choice in decisions)


def _of_trial(decisions: tuple[Choice, ...], settings: Mapping[str, Any]) -> dict[str, str]:
    return handed(decisions, {**settings, "resume": "no"}, "a candidate of the tuning", _NOT_OF_TRIALS)


def _load(modules: Sequence[str]) -> None:
    """Imports into this process the libraries that the script imports, so that no trial has to.

    A module that starts a thread when it is imported would make forks unsafe, so that a child process tries the imports first.
    """

    def stays_single_threaded() -> bool:
        _import(modules)
        return len(os.listdir("/proc/self/task")) == 1

    if not modules or not os.path.isdir("/proc/self/task"):
        return
    try:
        if in_child(stays_single_threaded):
            _import(modules)
    except (ChildError, PacelineError):
        pass  # each trial imports them, and the failure of the first one is shown


def _import(modules: Sequence[str]) -> None:
    # CUDA cannot be used in processes that are forked after `torch.cuda.is_available()`, which some libraries call when they
    # are imported. With this variable it asks NVML, which leaves CUDA alone.
    with environment.patched({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        for name in modules:
            importlib.import_module(name)


def _killed_by_system() -> int:
    """Returns how many processes the out-of-memory killer has ended since the system started; 0 if the system does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
