"""Kills processes of `train.py` at random times, and compares the result with a run without failures.

python examples/survive/chaos.py --kills 25 --seed 0

There is one run with two processes. Each time, SIGKILL is sent to one of the workers, or in one of four cases to the
launcher, which is then started again with the same command. These must be equal bit for bit: the final weights, and every
loss that was printed, also those of steps that were done twice. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
STEP = re.compile(r"step (\d+) loss (\S+)")
LAUNCHER_EVERY = 4
LOOK_S = 0.05
START_IN = 8  # one start in so many is disturbed


class Run:
    """A run of the script, which is started again if its launcher was killed.

    Args:
        out: folder for its checkpoints and its output.
        words: options of the script.
    """

    def __init__(self, out: Path, words: list[str]) -> None:
        out.mkdir(parents=True)
        self.said, self.starts = out / "said.txt", 0
        launch = [sys.executable, "-m", "paceline", "launch", "--procs", "2", "--cpu", "--threads", "1"]
        self._command = [*launch, "--max-restarts", "1000", str(HERE / "train.py"), "--out", str(out), *words]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the launcher."""
        with self.said.open("ab") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=file, start_new_session=True)
        self.starts += 1

    @property
    def launcher(self) -> int:
        """The launcher's pid."""
        return self._process.pid

    def workers(self) -> list[int]:
        """Pids of the processes that train."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                words = (each / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue  # it has ended in the meantime
            if parent == self.launcher and b"train.py" in words:
                found.append(int(each.name))
        return sorted(found)

    def code(self) -> int | None:
        """The exit code of the launcher; None while it is running."""
        return self._process.poll()

    def losses(self) -> list[tuple[int, str]]:
        """All printed steps with their losses."""
        return [(int(step), loss) for step, loss in STEP.findall(self.said.read_text(errors="replace"))]

    def end(self) -> None:
        """Ends the run, if it is running."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Runs twice and compares; returns 0 if everything is equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--apart-s", type=float, default=2.0, help="most seconds from a step that was seen to the next kill"
    )
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which it gives up")
    parser.add_argument("--out", help="folder to keep; a temporary one by default")
    args, words = parser.parse_known_args()
    root = Path(args.out or tempfile.mkdtemp(prefix="chaos-"))
    runs = [Run(root / name, words) for name in ("undisturbed", "disturbed")]
    try:
        return _compare(args, *runs)
    finally:
        for run in runs:
            run.end()
        if args.out is None:
            shutil.rmtree(root, ignore_errors=True)


def _compare(args: argparse.Namespace, alone: Run, disturbed: Run) -> int:
    deadline = time.monotonic() + args.limit_s
    began = time.monotonic()
    alone.start()
    start_s = 0.0  # until the first steps are printed
    while alone.code() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        if not start_s and alone.losses():
            start_s = time.monotonic() - began
    if alone.code() != 0:
        print(alone.said.read_text(errors="replace"), "the undisturbed run failed", sep="\n")
        return 1
    expected = dict(alone.losses())
    print(f"undisturbed: {time.monotonic() - began:.0f} s, {max(expected)} steps", flush=True)
    began = time.monotonic()
    kills = _disturb(args, disturbed, deadline, start_s)
    if disturbed.code() != 0:
        print(disturbed.said.read_text(errors="replace")[-4000:], "the disturbed run failed", sep="\n")
        return 1
    found = disturbed.losses()
    wrong = [(step, loss) for step, loss in found if expected[step] != loss]
    missing = sorted(expected.keys() - dict(found).keys())
    equal = _weights(disturbed) == _weights(alone)
    print(
        f"disturbed: {time.monotonic() - began:.0f} s, {kills} kills, {disturbed.starts} launches; "
        f"{len(found)} losses printed for {len(expected)} steps, {len(wrong)} differ, {len(missing)} are missing; "
        f"final weights {'equal, bit for bit' if equal else 'DIFFER'}"
    )
    return 0 if equal and not wrong and kills == args.kills else 1


def _disturb(args: argparse.Namespace, run: Run, deadline: float, start_s: float) -> int:
    """Kills at random until enough processes were killed, then lets the run end; returns their number."""
    draws, kills, seen = random.Random(args.seed), 0, 0
    strikes = _in_start(draws, start_s)
    run.start()
    while time.monotonic() < deadline:
        if run.code() is not None:
            if run.code() != -signal.SIGKILL:
                return kills
            run.start()
        # Usually while it trains; sometimes while it starts, loads a checkpoint, or ends the other processes.
        if strikes is None and len(run.losses()) > seen:
            strikes = time.monotonic() + draws.uniform(0, args.apart_s)
        if kills < args.kills and strikes is not None and time.monotonic() >= strikes:
            workers, whole = run.workers(), kills % LAUNCHER_EVERY == LAUNCHER_EVERY - 1
            if workers:
                kills, seen, strikes = kills + 1, len(run.losses()), _in_start(draws, start_s)
                step = max(dict(run.losses()), default=0)
                print(
                    f"kill {kills} of {args.kills}: {'the launcher' if whole else 'a worker'}, after step {step}",
                    flush=True,
                )
                os.kill(run.launcher if whole else draws.choice(workers), signal.SIGKILL)
        time.sleep(LOOK_S)
    return kills


def _in_start(draws: random.Random, start_s: float) -> float | None:
    """Returns when the start that begins now is disturbed; None for most, which are to come to a step.

    It is drawn from the time of a start, not from that of the clock: on a busy machine a start takes a minute.
    """
    moment = time.monotonic() + draws.uniform(0, start_s)
    return None if draws.randrange(START_IN) else moment


def _weights(run: Run) -> bytes:
    return (run.said.parent / "model" / "model.safetensors").read_bytes()


if __name__ == "__main__":
    sys.exit(main())
