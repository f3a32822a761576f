"""The report of a failure: the traceback of the first rank that failed, then which rank it was and why it ended."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

from paceline.base.connections import closed
from paceline.base.errors import Problem
from paceline.config.libraries import LIBRARIES
from paceline.config.schema import launch_flags
from paceline.launch.job import Job, Target
from paceline.launch.launcher import Outcome
from paceline.launch.processes.core_files import BACKTRACE
from paceline.launch.rounds import Round
from paceline.launch.script_libraries import ScriptLibrary, script_libraries

_HINTS = {
    signal.SIGKILL: "if nobody sent it, the system was out of memory (see `dmesg`): use a smaller batch or fewer "
    "processes",
    signal.SIGSEGV: "a crash in compiled code: the stack above shows what called it; run again with `--cores` for a "
    "backtrace of the compiled code",
    signal.SIGABRT: "compiled code called abort(): look for its message above; PACELINE_DEBUG=1 names collectives that "
    "differ between ranks; `--cores` gives a backtrace of the compiled code",
}

# What torch says where a script moves something to a GPU that it cannot use.
_NO_CUDA = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
_FIX = re.compile(r"^\s+fix: (.+)$", re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


def begun(decided: Round) -> str:
    """One line about a round that begins on several nodes."""
    nodes = len(decided.members)
    procs = sum(member.procs for member in decided.members)
    hosts = ", ".join(member.host for member in decided.members)
    count = f"{nodes} node{'s' * (nodes > 1)} ({hosts})"
    reason = f" after: {decided.reason}" if decided.reason else ""
    return f"paceline: round {decided.number}: {count}, {procs} process{'es' * (procs > 1)}{reason}"


def describe(outcome: Outcome, job: Job) -> str:
    """Returns the report of a run that failed, for standard error: the traceback, then the error."""
    error = f"paceline.LaunchError: {problem_of(outcome, job)}"
    if outcome.failure is None or outcome.elsewhere or not outcome.failure.report:
        return error
    return f"{outcome.failure.report}\n\n{error}"


def problem_of(outcome: Outcome, job: Job) -> Problem:
    """Returns what went wrong, why, and what the user can do about it.

    Several fixes may apply. A later one replaces or extends those before it, so the most specific one comes last.
    """
    # A run of one node has no other node that could fail. Here some of its processes have saved and ended, and others have
    # not ended within the grace period.
    if outcome.elsewhere and job.nodes == 1:
        saved = "exit code 75 says that a process has saved and ended, as all are asked to together"
        fix = "give them longer with --grace-s, or look at where they wait"
        return Problem("rank-failed", outcome.elsewhere, saved, fix)
    if outcome.elsewhere:
        why = [f"first failure: {outcome.elsewhere}"]
        if outcome.failure is not None:
            last_line = "".join(outcome.failure.report.splitlines()[-1:])  # the message of an exception
            why.append(f"after it, here: {outcome.failure.what} {last_line}".rstrip())
        return Problem("node-failed", "another node failed, and this one was stopped.", why, "look at its messages")
    failure = outcome.failure
    assert failure is not None, "this run did not fail"
    if failure.stuck:
        why = [
            f"--on-hang {job.on_hang} (or PACELINE_ON_HANG) ends such a run; --stuck-after says when it counts as stuck"
        ]
        fix = "look into the file of stacks that is named above: which rank is elsewhere than the others, and why"
        return Problem("run-stuck", failure.what, why, fix)
    # `report` is the traceback, or that of a crash in compiled code. A process that was killed has written none.
    fix = _own_fix(failure.report) or "correct the error that is shown above"
    if job.target.kind == "function" and failure.report and not _own_fix(failure.report):
        # In a notebook a long traceback of the launcher stands between the error and this line.
        fix = f"correct the error of the function: {failure.report.splitlines()[-1].strip()}"
    if not failure.report:
        fix = "its own output above tells more"
    fix = _misplaced_flag(failure.report, job.target) or fix
    # `waiting` names ranks that failed because this one ended without an error, and closed its connections to them.
    if failure.waiting:
        fix = f"find out why rank {failure.rank} ended before the others (sys.exit, os._exit, a shorter loop): every rank "
        fix += "must make the same calls, as often. `--debug` names the line at which each rank is"
    elif closed(failure.report) and "--debug" not in failure.report:
        fix += "; with `--debug` the error names the line of each rank"
    elif any(message in failure.report for message in _NO_CUDA):
        fix = f"run it where torch finds a GPU, or write `.to({_device(job)})` in place of `.cuda()`"
    fix = _served_names(failure.report, job) or fix
    if failure.code < 0:  # the negative number of the signal that ended it
        fix = _HINTS.get(-failure.code, "find out who sent that signal")  # type: ignore[call-overload]
        if BACKTRACE in failure.report:
            fix = "a crash in compiled code: the stack and the backtrace above say where"
    where = f"local rank {failure.local_rank}, node {failure.node}, " if job.nodes > 1 else ""
    how = "left" if failure.waiting else "failed"
    why = [f"it {how} first ({where}pid {failure.pid}); the other processes were then stopped"]
    why += failure.later
    if job.nodes * job.procs == 1:
        why = [f"pid {failure.pid}"]  # a single process is neither the first to fail, nor are others stopped
    return Problem("rank-failed", failure.what, why, fix)


def _own_fix(report: str) -> str:
    """Returns the fix that an error of Paceline itself names, as the last line is what people read; "" if it names none."""
    _, _, last_error = report.rpartition("\nTraceback ")
    fixes = list(dict.fromkeys(_FIX.findall(last_error)))
    if len(fixes) > 1:
        return f"each of the {len(fixes)} problems above has one"
    return "".join(fixes)


def _device(job: Job) -> str:
    """Returns how the script asks for its device, in the names of the library that it was written for."""
    libraries = script_libraries(job.compat.split(","))
    # A script for several libraries has them in one loop: an accelerator, which is ours too, is the shortest way.
    names = {library.device for library in libraries}
    return names.pop() if len(names) == 1 else ScriptLibrary.device


def _served_names(report: str, job: Job) -> str:
    """Returns what to do if the script imports a library whose names are not served to it; "" if it does not.

    The libraries that the script imports further down are named too: without them the next run would fail there.
    """
    served = job.compat.split(",") if job.compat else []
    not_served = set(LIBRARIES.names()) - set(served)
    # The second is what transformers says of a distribution; it may be followed by a version, as in 'LIBRARY>=0.9.3'.
    absent = r"No module named '{0}'|The '{0}\b[^']*' distribution was not found"
    missing = {library for library in not_served if re.search(absent.format(library), report)}
    if not missing:
        return ""
    script = Path(job.target.name)
    if job.target.kind == "script" and script.is_file():
        source = script.read_text(encoding="utf-8", errors="replace")
        imported = set(_IMPORT.findall(source))
        missing |= imported & not_served
    names = " and ".join(f"{library}'s" for library in sorted(missing))
    libraries = ",".join([*served, *sorted(missing)])
    fix = f"`paceline launch --compat {libraries}` serves {names} names"
    for library in script_libraries(served):
        if library.command:
            fix += f", and so does `PACELINE_COMPAT={libraries}` before `{library.command}`"
    return fix


def _misplaced_flag(report: str, target: Target) -> str:
    """Returns what to do if the script was given a flag of the launcher, which it does not know; "" if it was not."""
    # argparse in the script ends with this text, followed by the words that it does not know.
    _, _, listed = report.partition("unrecognized arguments: ")
    words = listed.split("\n")[0].split()
    flags = []
    for word in words:
        if word in target.args and word.partition("=")[0] in launch_flags():
            flags.append(word)
    if not flags:
        return ""
    # The command with these flags, and their values, moved in front of the script.
    before: list[str] = []
    after = list(target.args)
    for flag in flags:
        place = after.index(flag)
        end = place + 1
        if "=" not in flag and end < len(after) and not after[end].startswith("-"):
            end += 1  # its value
        before += after[place:end]
        del after[place:end]
    module = ["-m"] if target.kind == "module" else []
    command = shlex.join(["paceline", "launch", *before, *module, target.name, *after])
    return f"`{flags[0]}` is a flag of the launcher: write it before the script, as in `{command}`"
