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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.errors import PacelineError, PlanError
from paceline.base.temporary import temporary_folder
from paceline.config.given import Choice
from paceline.config.sources import HANDED, hand_over
from paceline.launch.launcher import LAUNCHERS, Job, Outcome, Target
from paceline.launch.report import problem_of
from paceline.launch.worker import become
from paceline.planner.device import Device
from paceline.planner.outlook import Outlook
from paceline.planner.rehearsal import Rehearsal, Troupe, in_child, rehearse
from paceline.planner.script_config import script_configs
from paceline.planner.search import Candidate, Forecast, Measured, Progress, Space, Tuning, sort_out
from paceline.planner.trial import Trial, noting
from paceline.planner.tune_space import rows_of, settings_of, space_of

_SAME_FAILURES = 3  # alike, one after the other, and nothing measured: it is the script


@dataclass(frozen=True)
class Task:
    """What is to be tuned.

    Attributes:
        job: the processes, as for a launch; its target is the script.
        decisions: what the command line and files say of the run.
        tuning: how to search; of a DeepSpeed script what its config says, under `said`.
        said: attributes of it that the command line said.
        device: what it runs on.
        limit_s: seconds that a trial may go without a step.
    """

    job: Job
    decisions: tuple[Choice, ...]
    tuning: Tuning
    said: Mapping[str, Any]
    device: Device
    limit_s: float


@dataclass
class Tuned:
    """What came of it.

    Attributes:
        task: what was tuned, with the tuning that was gone by.
        width: ranks that read different samples.
        space: what was varied, and what was not.
        forecasts: of all candidates.
        queue, left: those that were to be launched, in order; those that were not.
        progress: what was measured.
        content: the DeepSpeed config of the script; None where it has none.
        why: why no more trials were run.
        before_s: seconds of rehearsals, before the first trial.
        reused: how many results are those of an earlier run.
        again: how many were measured a second time, being too close to the fastest.
        problem: why a rehearsal did not come to a step; "" where it did.
    """

    task: Task
    width: int
    space: Space
    forecasts: dict[Candidate, Forecast]
    queue: list[Candidate]
    left: list[Candidate]
    progress: Progress
    content: dict[str, Any] | None = None
    why: str = ""
    before_s: float = 0.0
    reused: int = 0
    again: int = 0
    problem: str = ""

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """A candidate in our settings, but for what the script or the command line decides."""
        return settings_of(candidate, self.space, self.width)

    def target(self, candidate: Candidate) -> Target:
        """The script with the arguments of a candidate."""
        return with_arguments(self.task.job.target, candidate, self.task.tuning.arguments)


class Tuner:
    """Runs a search.

    Args:
        task: what to tune.
        tell: called after each trial with what is known, the candidate, and what is odd about its result.
        earlier: results of an earlier run of the same tuning, by the candidate's name; asked for once it is known what
            is tuned.
        keep: writes one result down.
    """

    def __init__(
        self,
        task: Task,
        tell: Callable[[Tuned, Candidate, str], None],
        earlier: Callable[[Task, Mapping[str, Any] | None], Mapping[str, Measured]],
        keep: Callable[[Candidate, Measured], None],
    ) -> None:
        self.task, self._tell, self._earlier, self._keep = task, tell, earlier, keep
        self.first_failure = ""

    def run(self) -> Tuned:
        """Searches to the end.

        Raises:
            PlanError: `tune-none`, where nothing could be measured; `plan-rehearsal`; `tune-steps`.
        """
        # Once, for all rehearsals and trials; torch._dynamo is what DistributedDataParallel takes a second to load.
        _import(["torch", "torch._dynamo", "paceline.accelerator"])
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="paceline-tune-", dir=temporary_folder()) as folder:
            self._folder = Path(folder)
            tuned = self._look()
            tuned.before_s = time.monotonic() - began
            gc.collect()
            gc.freeze()  # no collection touches, and so copies, what the trials share
            earlier = self._earlier(tuned.task, tuned.content)
            try:
                self._search(tuned, earlier)
            finally:
                gc.unfreeze()
        if tuned.progress.leader is None:
            raise self._nothing(tuned)
        return tuned

    # -- before the first trial ------------------------------------------------------------------------------

    def _look(self) -> Tuned:
        """Rehearses the script, and makes the candidates and their forecasts."""
        seen, notes = self._rehearse(None)
        content, config = notes.get("config"), None
        if content is not None:
            config = script_configs().read(content)
            self.task = replace(self.task, tuning=config.tuning(self.task.said))
        _load(notes.get("modules", ()))
        layout = seen.plan.layout
        width = layout.size("replicate", "shard")
        space = space_of(seen, notes, config, self.task.tuning, self.task.decisions, width)
        outlook = Outlook.of(seen, rows_of(notes), self.task.device, self.task.job.procs)
        other = next((each for each in space.candidates() if self._varies(each, outlook)), None)
        if other is not None:
            again, more = self._rehearse(replace(other, accumulate=seen.plan.accumulate))
            if rows_of(more) == other.micro:
                outlook = outlook.with_second(again, other.micro or 1)
            else:
                why = f"the script feeds {rows_of(more)} samples where {other.micro} were asked for"
                space = replace(
                    space,
                    micro=((None, seen.plan.accumulate),),
                    closed=(*space.closed, Choice("micro", outlook.rows, reason=why)),
                )
        candidates = space.candidates()
        forecasts = {each: outlook.forecast(each, settings_of(each, space, width)) for each in candidates}
        queue, left = sort_out(candidates, forecasts, self.task.device.usable, self.task.tuning)
        progress = Progress(self.task.tuning, {each: found.flops for each, found in forecasts.items()})
        return Tuned(self.task, width, space, forecasts, queue, left, progress, content, problem=seen.problem)

    def _rehearse(self, candidate: Candidate | None) -> tuple[Rehearsal, dict[str, Any]]:
        """One rehearsal, of the script as it is or with the micro-batch of a candidate; and what was noted."""
        job, path = self.task.job, self._folder / "notes.json"
        target = job.target
        if candidate is not None:
            target = with_arguments(target, candidate, self.task.tuning.arguments)
        troupe = Troupe(
            world_size=job.procs,
            local_size=job.procs,
            settings=_handed(self.task.decisions, {}),
            accelerated=not self.task.device.name.startswith("cpu"),
            compat=job.compat,
            memory=self.task.device.usable,
        )
        change = partial(_changed, candidate=candidate, arguments=self.task.tuning.arguments)

        def work() -> None:
            with noting(path, change, job.compat):
                become(target.on(0), job.compat)

        seen = rehearse(work, troupe)
        return seen, json.loads(path.read_text(encoding="utf-8"))

    def _varies(self, candidate: Candidate, outlook: Outlook) -> bool:
        """Whether a rehearsal of a candidate would tell what another micro-batch takes."""
        return outlook.rows is not None and candidate.micro is not None and candidate.micro != outlook.rows

    # -- trials ----------------------------------------------------------------------------------------------

    def _search(self, tuned: Tuned, earlier: Mapping[str, Measured]) -> None:
        failures: list[str] = []
        for candidate in tuned.queue:
            if tuned.why:
                break
            known = earlier.get(candidate.name)
            measured = known or self._try(tuned, candidate)
            if known is None:
                self._keep(candidate, measured)
            tuned.reused += known is not None
            tuned.progress.add(candidate, measured)
            self._tell(tuned, candidate, "from an earlier run" if known is not None else "")
            failures = [*failures, measured.why] if measured.status == "failed" else []
            tuned.why = tuned.progress.done
            if failures[-_SAME_FAILURES:] == [measured.why] * _SAME_FAILURES and tuned.progress.leader is None:
                tuned.why = f"{_SAME_FAILURES} trials failed alike, and none was measured"
        tuned.why = tuned.why or "all that fit were tried"
        for candidate in tuned.progress.contenders() if not tuned.reused else []:
            measured = self._try(tuned, candidate)
            if tuned.progress.again(candidate, measured):
                self._keep(candidate, measured)
            tuned.again += 1
            self._tell(tuned, candidate, "again")

    def _try(self, tuned: Tuned, candidate: Candidate) -> Measured:
        """One trial: processes forked from this one, to their end."""
        task = self.task
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        told = {} if tuned.content is not None else tuned.settings(candidate)
        memory = task.device.memory if task.device.name.startswith("cpu") else 0
        change = partial(_changed, candidate=candidate, arguments=task.tuning.arguments)
        trial = Trial(folder, task.tuning.first_step, task.tuning.last_step, task.limit_s, memory, change)
        target = tuned.target(candidate)
        out = Path(task.tuning.exps_dir) / candidate.name
        job = replace(
            task.job,
            target=Target("function", target.name, target.args, partial(trial.run, target, task.job.compat)),
            env={**task.job.env, **_handed(task.decisions, told, candidate.options if tuned.content is None else ())},
            start="fork",
            max_restarts=0,
            log_dir=str(out),
        )
        out.mkdir(parents=True, exist_ok=True)
        for each in out.glob("rank*"):
            each.unlink()
        if tuned.content is not None:
            content = script_configs().with_candidate(tuned.content, candidate, task.tuning.arguments)
            (out / "ds_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        killed, began = _killed_by_system(), time.monotonic()
        launcher = LAUNCHERS.get("local")
        outcome = launcher.submit(launcher.render(job)).wait()
        wall_s = time.monotonic() - began
        asked = outcome.exit_code - 128
        if outcome.failure is None and asked in (signal.SIGINT, signal.SIGTERM):
            raise KeyboardInterrupt if asked == signal.SIGINT else SystemExit(outcome.exit_code)
        measured = self._judge(folder, job, outcome, _killed_by_system() > killed, candidate, tuned.width)
        return replace(measured, wall_s=wall_s)

    def _judge(
        self, folder: Path, job: Job, outcome: Outcome, killed: bool, candidate: Candidate, width: int
    ) -> Measured:
        """What the processes of a trial left behind."""
        words = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        short = next((each for each in words if each["status"] == "does not fit"), None)
        if short is not None:
            return Measured("does not fit", why=str(short["why"]))
        if outcome.failure is not None and outcome.failure.code == -signal.SIGKILL and killed:
            return Measured("does not fit", why="the system killed a process for want of memory")
        stack = next((path for path in sorted(folder.glob("rank*.stack")) if path.stat().st_size), None)
        if stack is not None:
            self._first(stack.read_text())
            return Measured("failed", why=f"no step within {self.task.limit_s:g} s")
        if outcome.failure is not None:
            problem = problem_of(outcome, job)
            self._first(outcome.failure.report or f"{problem.what} See {job.log_dir}.")
            last = outcome.failure.report.strip().splitlines()[-1:] or [problem.what]
            found = next(
                (line for line in outcome.failure.report.splitlines() if line.startswith("paceline.")), last[0]
            )
            return Measured("failed", why=found)
        if len(words) < job.procs or any(each["status"] != "measured" for each in words):
            done = min((each["done"] for each in words), default=0)
            first, last_step = self.task.tuning.first_step, self.task.tuning.last_step
            why = f"the script ended after {done} steps; steps {first} to {last_step} are measured"
            return Measured("failed", why=why)
        rows = words[0].get("rows")
        if candidate.micro is not None and rows not in (None, candidate.micro):
            return Measured("failed", why=f"the script feeds {rows} samples where {candidate.micro} were asked for")
        slowest = max(words, key=lambda each: statistics.median(each["steps"]))["steps"]
        return Measured(
            "measured",
            statistics.median(slowest),
            statistics.median(abs(each - statistics.median(slowest)) for each in slowest),
            candidate.batch(width) or words[0].get("batch"),
            max(each["bytes"] for each in words),
        )

    def _first(self, report: str) -> None:
        self.first_failure = self.first_failure or report.rstrip()

    def _nothing(self, tuned: Tuned) -> PacelineError:
        results = tuned.progress.results
        why = [f"{each.name}: {seen.why}" for each, seen in results.items()][:4]
        why += [f"{each.name} was not launched: {verdict(tuned, each)}" for each in tuned.left[: 4 - len(why)]]
        steps = all("steps" in seen.why and seen.status == "failed" for seen in results.values()) if results else False
        if steps:
            fix = "let the script take more optimizer steps, or measure earlier ones: --first-step 2 --last-step 3"
            return PlanError("tune-steps", "the script ends before the steps that are measured.", why, fix)
        fix = "see that the script trains under `paceline launch`; where memory does not suffice, use more processes"
        return PlanError("tune-none", "no candidate could be measured.", why, fix)


def verdict(tuned: Tuned, candidate: Candidate) -> str:
    """Why a candidate was not launched."""
    from paceline.planner.estimate import gib

    found, device = tuned.forecasts[candidate], tuned.task.device
    if found.problem:
        return found.problem
    return f"needs {gib(found.bytes)} a rank, {gib(device.usable)} of {device.name} can be used"


def with_arguments(target: Target, candidate: Candidate, arguments: Mapping[str, str]) -> Target:
    """The script with those of its arguments that follow the candidate."""
    words = list(target.args)
    for name, flag in arguments.items():
        value = candidate.micro if name == "micro" else candidate.accumulate
        if value is None:
            continue
        at = next((number for number, word in enumerate(words) if word == flag or word.startswith(f"{flag}=")), None)
        if at is None:
            words += [flag, str(value)]
        elif words[at] == flag:
            words[at + 1 : at + 2] = [str(value)]
        else:
            words[at] = f"{flag}={value}"
    return replace(target, args=tuple(words))


def _changed(
    content: Mapping[str, Any], candidate: Candidate | None, arguments: Mapping[str, str]
) -> Mapping[str, Any]:
    if candidate is None:
        return script_configs().plain(content)
    return script_configs().quiet_candidate(content, candidate, arguments)


def _handed(
    decisions: tuple[Choice, ...], told: Mapping[str, Any], options: tuple[tuple[str, Any], ...] = ()
) -> dict[str, str]:
    """Settings for the processes: what was said, and in its place what a candidate says."""
    rows = [each for each in decisions if each.field not in told and each.field not in ("resume", "profile")]
    rows += [Choice(name, value, "command line", "a candidate of the tuning") for name, value in told.items()]
    rows += [Choice(f"options.{name}", value, "command line", "a candidate of the tuning") for name, value in options]
    rows += [Choice("resume", "no", "command line", "the tuning")]
    return {HANDED: hand_over(rows)}


def _load(modules: Iterator[str] | list[str] | tuple[str, ...]) -> None:
    """Imports here what the script imports from libraries, so that no trial has to.

    A module that starts a thread when it is imported would make forks unsafe: it is tried in a process of its own first.
    """

    def quiet() -> bool:
        _import(modules)
        return len(os.listdir("/proc/self/task")) == 1

    if modules and os.path.isdir("/proc/self/task") and in_child(quiet) == ("result", True):
        _import(modules)


def _import(modules: Any) -> None:
    for name in modules:
        importlib.import_module(name)


def _killed_by_system() -> int:
    """Processes that the system has killed for want of memory since it started; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
