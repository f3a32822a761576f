"""Submits jobs to the queue of SLURM, follows, requeues and cancels them, with sbatch, scontrol and scancel."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.base.exits import INTERRUPTED
from paceline.base.followed_file import FollowedFile
from paceline.base.terminal import say
from paceline.launch.launcher import Outcome
from paceline.launch.processes.output import show
from paceline.launch.processes.signals import Signals

_LOOK_S = 1.0
_PATIENCE_S = 600.0  # for a controller that restarts, or fails over to its backup
_COMMAND_S = 120.0  # an overloaded slurmctld answers late
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|configuration (source|file)|connection refused", re.IGNORECASE
)
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
# Reasons of jobs that will never start: they request more than their partition, account or quality of service allows.
_FOR_EVER = re.compile(
    r"Partition(NodeLimit|TimeLimit|Config)|BadConstraints|Invalid(Account|QOS)|(Account|QOS)NotAllowed"
    r"|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?"
)
# Reasons of jobs that wait until somebody releases them: held by a person, or by SLURM after a failed start on a node.
_HELD = re.compile(r"JobHeld\w+|JobHoldMaxRequeue|\w+_requeued(_in)?_held\w*")
_NO_ELEMENT = "4294967294"  # stands in the name of a log for elements of a job array that have not begun
_FIELD = re.compile(r"([\w:/.-]+?)=(.*?)(?=\s[\w:/.-]+=|\s*$)")
# What SLURM prints, and the fix. The first entry that is found counts.
_FIXES = (
    ("would never start", "ask for less than the limits of the partition, or choose another --partition"),
    ("account", "choose an account of yours with --account (`sacctmgr show associations user=$USER`)"),
    ("partition", "choose a partition of this cluster with --partition (`sinfo --summarize`)"),
    ("qos", "choose a quality of service that you may use (`sacctmgr show associations user=$USER format=qos`)"),
    ("time", "give a shorter --time, or a --partition with a longer limit (`sinfo --summarize`)"),
    ("cpu", "ask for fewer processes or --cpus-per-proc"),
    ("processors", "ask for fewer processes or --cpus-per-proc"),
    ("node", "ask for fewer --nodes, CPUs or GPUs, or choose another --partition"),
    ("generic resource", "ask for GPUs as `sinfo --Format=nodes,gres` names them"),
)


@dataclass(frozen=True)
class QueueRecord:
    """A job as `scontrol show job` describes it.

    Attributes:
        job: the number of the job, as `scontrol` takes it.
        element: the number in a job array; "" if the job is in none.
        state: the state in SLURM's words, such as PENDING, RUNNING or COMPLETED.
        reason: why the job waits, or why it has ended in this state.
        code: the exit code; 128 plus the number of the signal that ended it, as in a shell.
        restarts: how often it went back to the queue.
        nodes: the names of its nodes; "" while it does not run.
        log: the file with its output.
    """

    job: str
    element: str
    state: str
    reason: str
    code: int
    restarts: int
    nodes: str
    log: str

    @property
    def has_ended(self) -> bool:
        """Whether the job neither waits nor runs.

        Only states of jobs that wait or run are listed here, so an unknown state counts as an end.
        """
        return self.state not in _WAITING | _RUNNING


def submit(script: str, wanted: Sequence[str], env: Mapping[str, str]) -> str:
    """Puts a job into the queue; returns its number.

    Args:
        script: the batch script.
        wanted: what was asked for, each value with its source, for messages.
        env: variables that the job gets besides those of this process.

    Raises:
        LaunchError: `slurm-unreachable`; `slurm-refused`, where SLURM does not take the job, or would never start it.
    """
    config = environment.snapshot().get("SLURM_CONF")
    if config and not Path(config).is_file():
        # Without this check each command of SLURM would look for the file for a minute, and print nothing.
        raise LaunchError(
            "slurm-unreachable",
            "the configuration of SLURM is not there; nothing was submitted.",
            why=f"SLURM_CONF={config}",
            fix="unset SLURM_CONF, or set it to the file of a cluster with which `sinfo` works",
        )
    done = _run(["sbatch", "--parsable"], script, env)
    if done.returncode:
        _raise_refused(_said_by(done), wanted)
    job = done.stdout.strip().partition(";")[0]  # `--parsable` prints JOB, or JOB;CLUSTER
    # SLURM accepts some jobs that exceed a limit, and leaves them in the queue for ever. Such a job is refused here.
    for record in records(job):
        if record.state == "PENDING" and _FOR_EVER.fullmatch(record.reason):
            cancel(job)
            _raise_refused(f"job {job} would never start: {record.reason}", wanted)
    return job


def records(job: str) -> list[QueueRecord]:
    """Returns the job as SLURM describes it now, or all elements of a job array; empty where there is no such job (any more).

    Raises:
        LaunchError: `slurm-unreachable`.
    """
    done = _run(["scontrol", "show", "job", "--oneliner", job])
    if done.returncode:
        if _UNREACHABLE.search(done.stderr):
            raise _unreachable_error(_said_by(done))
        return []
    return [_record(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]


def _record(line: str) -> QueueRecord:
    """One line of `scontrol show job --oneliner`."""
    fields = dict(_FIELD.findall(line))
    code, _, signum = fields.get("ExitCode", "0:0").partition(":")
    element = fields.get("ArrayTaskId", "")
    job = f"{fields['ArrayJobId']}_{element}" if element else fields["JobId"]
    nodes = fields.get("NodeList", "").replace("(null)", "")
    exit_code = int(code)
    if exit_code == 0 and int(signum):
        exit_code = 128 + int(signum)  # as a shell counts
    output = fields.get("StdOut", "").replace("%%", "%")
    restarts = int(fields.get("Restarts", 0))
    return QueueRecord(job, element, fields["JobState"], fields.get("Reason", ""), exit_code, restarts, nodes, output)


def requeue(job: str) -> str:
    """Puts a job back into the queue. Returns "" if SLURM did so, or else its error message."""
    done = _run(["scontrol", "requeue", job])
    return _said_by(done) if done.returncode else ""


def cancel(job: str) -> None:
    """Cancels a job: SLURM asks its processes to end, and kills those that are left after its KillWait."""
    _run(["scancel", job])


def follow(job: str) -> Outcome:
    """Shows what a job writes until it has ended; returns its exit code.

    The first Ctrl-C or SIGTERM cancels the job and waits for its end, a second one leaves at once. A terminal that is
    closed (SIGHUP) leaves the job alone.

    Raises:
        LaunchError: `slurm-job`, where SLURM has ended it; `slurm-unreachable`.
    """
    follower = _OutputFollower(job)
    signals = Signals(lambda number: None)
    signals.enter()
    try:
        while follower.look():
            for number in signals.take_new():
                if number == signal.SIGHUP:
                    say(f"job {job} goes on; cancel it with: scancel {job}")
                    return Outcome(128 + number)
                if len(signals.ending) > 1:
                    return Outcome(INTERRUPTED)
                say(f"cancelling job {job}; its processes have SLURM's KillWait to save")
                cancel(job)
            time.sleep(_LOOK_S)
    finally:
        signals.leave()
    follower.finish()
    if signals.ending:
        return Outcome(128 + signals.ending[0])
    return follower.outcome()


class _OutputFollower:
    """Shows the state and the output of a job, or of all elements of a job array.

    Args:
        job: the number of the job.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        # The job, or each element of a job array, that has ended. SLURM removes the record of an element some minutes after
        # its end (MinJobAge), while other elements still run.
        self._ended: dict[str, QueueRecord] = {}
        self._logs: dict[str, _Log] = {}
        self._news: dict[str, str] = {}  # the last line about each job

    def look(self) -> bool:
        """Shows what is new. Returns whether the job still waits or runs.

        Raises:
            LaunchError: `slurm-unreachable`.
        """
        records = _records_patiently(self._job)
        for record in records:
            self._logs.setdefault(record.job, _Log(record)).copy()
            line = _state_of(record)
            if line != self._news.get(record.job) and not record.has_ended:
                say(line)
            self._news[record.job] = line
            if record.has_ended:
                self._ended[record.job] = record
            else:
                self._ended.pop(record.job, None)  # it may have gone back to the queue
        return not all(record.has_ended for record in records)

    def finish(self) -> None:
        """Shows what is left of the logs."""
        for job, log in self._logs.items():
            log.finish()
            if not log.is_there and job in self._ended:
                say(f"the log {self._ended[job].log} is not there, or cannot be read from this host")

    def outcome(self) -> Outcome:
        """Returns the outcome of the job, after its end.

        Raises:
            LaunchError: `slurm-job`, if SLURM has ended it, or does not know it any more.
        """
        failed = [record for record in self._ended.values() if record.state != "COMPLETED"]
        for record in failed:
            is_there = self._logs[record.job].is_there
            if record.state == "FAILED" and record.code and is_there:
                continue  # a rank has failed, and the log that was shown has its traceback
            raise _job_error(record, is_there)
        if failed:
            return Outcome(failed[0].code)
        unknown = self._jobs_of_unknown_end()
        if unknown or not self._ended:
            raise LaunchError(
                "slurm-job", f"SLURM knows nothing of job {', '.join(unknown) or self._job} any more.",
                "its records were removed (MinJobAge)", f"see how it ended: sacct --jobs {self._job}",
            )  # fmt: skip
        return Outcome(0)

    def _jobs_of_unknown_end(self) -> list[str]:
        """Returns the jobs that have ended while the controller did not answer, and whose records were removed meanwhile."""
        # Elements that wait have one record, such as "12_3-5". It is gone when all of them have begun: then there is one of
        # each element.
        seen_jobs = {re.sub(r"(_\d+)\D.*", r"\1", job) for job in self._logs}
        return sorted(seen_jobs - self._ended.keys())


def _records_patiently(job: str) -> list[QueueRecord]:
    """Returns `records(job)`, and tries again for some minutes if the controller does not answer.

    Raises:
        LaunchError: `slurm-unreachable`.
    """
    away_since = time.monotonic()
    while True:
        try:
            return records(job)
        except LaunchError:
            if time.monotonic() - away_since > _PATIENCE_S:
                raise
            time.sleep(_LOOK_S)


def _job_error(record: QueueRecord, has_log: bool) -> LaunchError:
    """Returns the error where SLURM has ended a job, or could not run it."""
    where = f" on {record.nodes}" if record.nodes else ""
    log = record.log
    fix = "start again: the script resumes from its last checkpoint"
    if not has_log:
        log += ", which is not there"
        fix = "submit it from a folder that the nodes share with this host"
    return LaunchError(
        "slurm-job",
        f"job {record.job} ended as {record.state}{where}.",
        why=[f"reason: {record.reason}, exit code {record.code}", f"log: {log}"],
        fix=fix,
    )


def _state_of(record: QueueRecord) -> str:
    """A line about the state of a job."""
    line = f"job {record.job}: {record.state.lower()}"
    if record.state in _WAITING and record.reason != "None":
        line += f" ({record.reason})"
        if _HELD.fullmatch(record.reason):
            line += f"; it is on hold until you release it: scontrol release {record.job}"
    if record.state == "RUNNING":
        line += f" on {record.nodes}"
    if record.restarts:
        line += f", restart {record.restarts}"
    return line


class _Log(FollowedFile):
    """Shows the log file of a job, from where it was last read.

    Args:
        record: the job.
    """

    def __init__(self, record: QueueRecord) -> None:
        super().__init__(record.log)
        self._element = record.element

    def copy(self) -> None:
        """Shows the lines that are new."""
        with suppress(OSError):  # this host may not read it; at the end `_OutputFollower.finish` says so
            for line in self.read():
                self._show(line)

    def finish(self) -> None:
        """Shows what is left: also a last line that the job has not finished."""
        self.copy()
        if self.rest:
            self._show(self.rest)

    def _show(self, line: bytes) -> None:
        mark = f"{self._element}: ".encode() if self._element else b""
        show(sys.stdout, mark + line + b"\n")


def _run(
    words: Sequence[str], text: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command of SLURM, in a session of its own, so that a Ctrl-C at the terminal does not end it halfway.

    Raises:
        LaunchError: `slurm-unreachable`, where it does not end.
    """
    try:
        return subprocess.run(
            list(words), input=text or "", env={**environment.snapshot(), **(env or {})}, capture_output=True, text=True,
            errors="replace", timeout=_COMMAND_S, start_new_session=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _unreachable_error(f"{words[0]} did not end within {_COMMAND_S:g} s") from None


def _said_by(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the standard error of a command in one line, without the name of the command before each message."""
    text = re.sub(r"^\w+: (error: |fatal: )?", "", done.stderr, flags=re.MULTILINE)
    lines = filter(None, text.splitlines())
    return "; ".join(lines) or f"exit code {done.returncode}"


def _raise_refused(message: str, wanted: Sequence[str]) -> None:
    if _UNREACHABLE.search(message):
        raise _unreachable_error(message)
    fix = "ask for something else, or see --sbatch-args"
    for words, fix_of_words in _FIXES:
        if words in message.lower():
            fix = fix_of_words
            break
    raise LaunchError(
        "slurm-refused",
        "SLURM does not take the job; nothing is in its queue.",
        why=[f"SLURM says: {message}", *wanted, *_partitions()],
        fix=fix,
    )


def _partitions() -> list[str]:
    """Returns one line for each partition that says what it has; [] if SLURM does not answer."""
    form = "partition %R: %D nodes, %c CPUs each, GPUs %G, up to %l"
    done = _run(["sinfo", "--noheader", f"--format={form}"])
    if done.returncode != 0:
        return []
    return done.stdout.replace("(null)", "none").splitlines()


def _unreachable_error(message: str) -> LaunchError:
    config = environment.snapshot().get("SLURM_CONF", "its default place")
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        answers = [" ".join(line.split()) for line in done.stdout.splitlines() if " at " in line]
    except subprocess.TimeoutExpired:
        answers = [f"scontrol ping did not end within {_COMMAND_S:g} s"]
    return LaunchError(
        "slurm-unreachable",
        "SLURM's controller cannot be reached.",
        why=[f"SLURM says: {message}", *answers, f"slurm.conf: {config}"],
        fix="see with `scontrol ping` whether it is up, and whether this host is one that may submit jobs",
    )


def tell(job: str) -> None:
    """Prints where the output of a job goes, and how to follow and cancel the job."""
    logs = [record.log for record in records(job)]
    lines = [f"job {job} is in the queue of SLURM", f"cancel it: scancel {job}"]
    if logs:
        log = shlex.quote(logs[0]).replace(_NO_ELEMENT, "*")
        lines.insert(1, f"follow it: tail -F {log}")
    print(*lines, sep="\n", flush=True)
