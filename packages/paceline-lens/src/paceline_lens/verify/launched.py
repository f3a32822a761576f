"""`LaunchedRuns`: the script's processes, forked from this one, which has imported what they need, as `paceline tune` does.

Where a run is to be as unlike the first as may be ("again"), its process begins anew, with another hash seed.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.config.given import Choice
from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline_lens.own_runs import handed, run_here
from paceline_lens.verify.bare.recorder import BareRecorder
from paceline_lens.verify.case import RunFailed, VerifyCase
from paceline_lens.verify.isolation import IsolationReport
from paceline_lens.verify.plain import PlainRecorder
from paceline_lens.verify.probed import ProbedScript, read_report
from paceline_lens.verify.recorder import Recorder
from paceline_lens.verify.recording import Recording, read_all

_NOT_HANDED = ("resume", "profile", "split_batches")
_OTHER_HASH_SEED = "4242"


class LaunchedRuns:
    """Runs a script on this host.

    Args:
        job: its processes, as for a launch; the number of them comes from each case.
        decisions: what the command line and files say of the run.
        steps: optimizer steps after which a run is ended.
        folder: where recordings and the output of processes go.
        plain: the script from before, if the runs are also compared with that.
    """

    def __init__(
        self, job: Job, decisions: Sequence[Choice], steps: int, folder: Path, plain: Target | None = None
    ) -> None:
        self._job = job
        self.plain = plain
        self._decisions = decisions
        self._steps = steps
        self._folder = folder
        for name in ("torch", "paceline.torch_internals.compiler", "paceline.accelerator"):  # once, for all forks
            importlib.import_module(name)
        gc.collect()

    def __call__(
        self,
        case: VerifyCase,
        *,
        double: bool = False,
        nudge: float = 0.0,
        again: bool = False,
        as_written: bool = False,
    ) -> Sequence[Recording]:
        """Runs the script, and returns the recordings of all ranks.

        Args:
            case: the number of processes and the plan.
            double: whether to compute in float64.
            nudge: see `Recorder`.
            again: whether to make the run as different from an earlier one as possible: new processes, another hash seed.
            as_written: whether to change nothing in it, as for a comparison with the script from before.

        Raises:
            RunFailed: if a process ended with an error, or took no step.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        recorder = Recorder(folder, self._steps, double=double, nudge=nudge, as_written=as_written)
        return self._run(
            folder, self._job.target, partial(recorder.run, self._job.target, self._job.compat), case, again
        )

    def run_plain(self) -> Sequence[Recording]:
        """Runs the script from before as it is, and returns its recording.

        Raises:
            RunFailed: if it ended with an error, or took no step.
        """
        assert self.plain is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        recorder = PlainRecorder(folder, self._steps, environment.snapshot())
        return self._run(folder, self.plain, partial(recorder.run, self.plain), VerifyCase(1), again=False)

    def run_bare(
        self, case: VerifyCase, *, parts: Sequence[int] = (), share: int = 1, nudge: float = 0.0, again: bool = False
    ) -> Sequence[Recording]:
        """Runs a script that has nothing of Paceline in it, and returns the recordings of all ranks.

        Args:
            case: the number of processes.
            parts, share, nudge: see `BareRecorder`.
            again: as for a script with Paceline.

        Raises:
            RunFailed: if a process ended with an error, or took no step.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        recorder = BareRecorder(folder, self._steps, parts=parts, share=share, nudge=nudge)
        return self._run(folder, self._job.target, partial(recorder.run, self._job.target), case, again)

    def probe(self, laws: dict[str, Any]) -> IsolationReport:
        """Runs the script on one process up to the first call of its model, and probes that (`isolation.py`).

        Raises:
            RunFailed: if the script ended with an error, or called no model in training.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        probe = ProbedScript(folder, laws)
        script = self._job.target
        self._finish(folder, script, partial(probe.run, script, self._job.compat), VerifyCase(1), again=False)
        report = read_report(folder)
        if report is None:
            raise RunFailed("the script ended before it called a model in training")
        return report

    def _run(
        self, folder: Path, script: Target, work: Callable[[], object], case: VerifyCase, again: bool
    ) -> Sequence[Recording]:
        self._finish(folder, script, work, case, again)
        recordings = read_all(folder)
        if len(recordings) < case.procs:
            raise RunFailed(f"{case.procs - len(recordings)} of {case.procs} processes left without a recording")
        if not any(event["kind"] == "step" for event in recordings[0].events):
            raise RunFailed("the script ended before an optimizer step")
        return recordings

    def _finish(self, folder: Path, script: Target, work: Callable[[], object], case: VerifyCase, again: bool) -> None:
        """Runs a script to its end, in processes that do the work.

        Raises:
            RunFailed: if a process ended with an error.
        """
        log_dir = folder / "output"
        log_dir.mkdir()
        variables = {**self._job.env, **handed(self._decisions, case.settings, "--plans", _NOT_HANDED)}
        if again:
            variables["PYTHONHASHSEED"] = _OTHER_HASH_SEED
        job = replace(
            self._job,
            target=Target("function", script.name, script.args, work),
            procs=case.procs,
            env=variables,
            start="exec" if again else self._job.start,
            max_restarts=0,
            log_dir=str(log_dir),
            tee=None,
            ranks=frozenset(),
            cores=(),
        )
        outcome = run_here(job)
        if outcome.failure is not None:
            report = outcome.failure.report.strip() or problem_of(outcome, job).what
            ours = report.find("paceline.")
            lines = report[max(ours, 0) :].splitlines() if ours >= 0 else report.splitlines()[-3:]
            raise RunFailed("\n".join(lines[:6]))
