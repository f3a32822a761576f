"""The same DeepSpeed script under the real DeepSpeed and under ours: a step, the start, and a trial of tuning.

    make bench-deepspeed                            makes .venv-deepspeed with the peer, then runs this
    python benchmarks/bench_deepspeed.py            all rows, as Markdown
    python benchmarks/bench_deepspeed.py --turns 5 --size 4M --only "zero 2"

Steps: a GPT of 24 million parameters on 2 ranks, one thread each, float32 AdamW, no clipping, 8 x 64 tokens a rank. Both pairs
of processes are up at once and step in turns, so the one that waits sleeps. The peer uses its own FusedAdam where it is
built (`--torch-adam`: torch's); its operators are built before anything is timed. Start: from the launcher's command to the
end of the first step, the peer's cache warm. A trial of tuning is compared with that start too: the peer starts a job for each
trial, so none of its trials can be shorter.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from timing import Result, pairs

HERE = Path(__file__).parent
PROGRAM = HERE / "parallel" / "deepspeed_program.py"
PEER = HERE.parent / ".venv-deepspeed" / "bin"
OURS = Path(sys.executable).parent
RANKS = 2
SERVED = (
    "import runpy, sys; from paceline.compat import install; install(['deepspeed']); sys.argv = sys.argv[1:]; "
    "sys.path[0] = sys.argv[0].rpartition('/')[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
STEP_MUST, START_MUST = 0.85, 0.25


def environment(folder: Path) -> dict[str, str]:
    """What both get: one thread a rank, the CPU, and their own programs first."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(RANKS),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }


class Ranks:
    """Two processes of the program, each of which takes a step when it is told to."""

    def __init__(self, python: Sequence[str], folder: Path, arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        self._ranks = [
            subprocess.Popen(
                [*python, str(PROGRAM), "--on-call", *arguments],
                env={**environment(folder), **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def step(self) -> float:
        """Seconds of one step; of the rank that took longest."""
        for each in self._ranks:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        return max(float(_answer(each, r"step took (\S+)")) for each in self._ranks)

    def __enter__(self) -> Ranks:
        for _ in range(3):  # operators, buckets, states and caches made
            self.step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._ranks:
            if kind is not None:
                each.kill()
            assert each.stdin is not None
            each.stdin.close()
        for each in self._ranks:
            each.wait()


def _answer(process: subprocess.Popen[str], pattern: str) -> str:
    """What the pattern finds in the next line that holds it; a library may print lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(pattern, line)
        if found:
            return found[1]
    raise SystemExit(f"a process ended early, with {process.wait()}: {' '.join(map(str, process.args))}")


def steps(stage: int, arguments: Sequence[str], turns: int) -> Result:
    """A step of both, in turns."""
    arguments = ["--stage", str(stage), *arguments]
    with (
        Ranks([str(OURS / "python"), "-c", SERVED], OURS, arguments) as ours,
        Ranks([str(PEER / "python")], PEER, arguments) as peer,
    ):
        return pairs(ours.step, peer.step, turns)


def first_step(command: Sequence[str | Path], folder: Path, arguments: Sequence[str]) -> Callable[[], float]:
    """Seconds from a launcher's command to the end of the first step."""

    def run() -> float:
        begun = time.time()
        done = subprocess.run(
            [*command, "--num_gpus", str(RANKS), PROGRAM, "--once", *arguments],
            env=environment(folder), capture_output=True, text=True,
        )  # fmt: skip
        found = re.search(r"first step done at (\S+)", done.stdout)
        if found is None:
            raise SystemExit(f"{command[0]} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        return float(found[1]) - begun

    return run


def trial(arguments: Sequence[str]) -> float:
    """Seconds of one trial of `paceline tune`, the mean over a few."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["tune", "--compat", "deepspeed", "--procs", str(RANKS), "--trials", "4", "--results", folder]
        done = subprocess.run(
            [OURS / "paceline", *words, "--arg", "micro=--rows", PROGRAM, *arguments, "--steps", "20"],
            env=environment(OURS), capture_output=True, text=True,
        )  # fmt: skip
    found = re.search(r"(\S+) s a trial", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"paceline tune failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--starts", type=int, default=5, help="turns of the start")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--size", choices=("24M", "4M", "tiny"), default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--torch-adam", action="store_true", help="torch's AdamW for the peer, not its FusedAdam")
    options = parser.parse_args()
    if not (PEER / "deepspeed").exists():
        print(
            "DeepSpeed is not installed, so nothing was compared: `make bench-deepspeed` makes .venv-deepspeed for it."
        )
        return
    task = ["--size", options.size, "--rows", str(options.rows), "--length", str(options.length)]
    task += ["--torch-adam"] if options.torch_adam else []
    peer = f"DeepSpeed ({'torch AdamW' if options.torch_adam else 'FusedAdam'})"
    print(
        f"{time.strftime('%Y-%m-%d')}, {options.turns} turns, {options.starts} starts, medians (quartiles), "
        f"GPT {options.size}, {options.rows} x {options.length} tokens a rank\n"
    )
    print("| what | Paceline | peer | ratio | must reach |\n| --- | --- | --- | --- | --- |")
    for stage in (1, 2, 3):
        if options.only in f"zero {stage}, step":
            row = steps(stage, task, options.turns).row(f"zero {stage}, step", peer, f"<= {STEP_MUST:.2f}")
            print(row, flush=True)
    if options.only in "start to first step":
        ours = first_step([OURS / "paceline", "deepspeed"], OURS, task)
        found = pairs(ours, first_step([PEER / "deepspeed"], PEER, task), options.starts)
        print(found.row("start to first step", peer, f"<= {START_MUST:.2f}"), flush=True)
        each = trial(task)
        start = f"{peer}, its start alone {found.peer_s:.1f} s"
        print(f"| a trial of tuning | {each:.1f} s | {start} | {each / found.peer_s:.3f} | - |")


if __name__ == "__main__":
    main()
