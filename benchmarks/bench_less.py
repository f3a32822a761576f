"""Ways to need less memory, each beside the library that has it: float8, states in 8 bits, QLoRA, states on disk, activations.

    python benchmarks/bench_less.py --peer PYTHON --folder /local/nvme

Markdown. PYTHON has the peers: torchao, accelerate, transformers, peft, bitsandbytes, and DeepSpeed with async_io built.
Paceline runs under it as well, from its source, so that all have the same torch; activations need the simulated device
(`tests/simulated_device`), built for it. One process and one thread each. All processes of a table are up at once and take
steps in turns, so the one that waits sleeps; a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "parallel" / "less_program.py"
FROM_SOURCE = HERE.parent / "dev" / "from_source.py"
SIMULATED = HERE.parent / "tests" / "simulated_device" / "site"
PEERS = {
    "fp8": ("torchao",),
    "fp8-bf16": ("accelerate",),
    "adamw8bit": ("torchao",),
    "qlora": ("accelerate",),
    "disk": ("deepspeed",),
    "activations": ("torch",),
}
SKIPPED = 2  # the steps that make states and buffers


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Candidate:
    """A process of the program, which answers each line by one line."""

    def __init__(self, python: str, what: str, by: str, arguments: list[str]) -> None:
        self.by = by
        self.steps: list[dict[str, float]] = []
        start = [python, str(FROM_SOURCE)] if by == "paceline" else [python]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        if by == "deepspeed":
            own |= {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": free_port(),
            }
        own["PATH"] = f"{Path(python).parent}{os.pathsep}{own['PATH']}"
        if what == "activations":
            own["PYTHONPATH"] = str(SIMULATED)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it is read when the process has ended
        self._process = subprocess.Popen(
            [*start, str(PROGRAM), "--what", what, "--by", by, *arguments],
            env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def ask(self, word: str) -> dict[str, float]:
        """Returns the answer to `step` or `memory`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(word, file=self._process.stdin, flush=True)
            return dict(json.loads(self._process.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            self._process.kill()
            self._errors.seek(0)
            raise SystemExit(f"{self.by} ended:\n{self._errors.read()[-4000:]}") from error

    def end(self) -> None:
        self._process.communicate()


def table(python: str, what: str, turns: int, arguments: list[str]) -> None:
    """Prints the rows of one way to need less."""
    candidates = [Candidate(python, what, by, arguments) for by in ("paceline", *PEERS[what])]
    for turn in range(SKIPPED + turns):
        for candidate in candidates if turn % 2 else reversed(candidates):
            candidate.steps.append(candidate.ask("step"))
    columns = (
        "CPU s a step", "Paceline's CPU / its", "seconds / its", "MiB at rest", "at the peak", "last loss", "losses differ by"
    )  # fmt: skip
    print(f"**{what}**\n\n| | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    ours = candidates[0]
    for candidate in candidates:
        memory = candidate.ask("memory")
        candidate.end()
        cpu = statistics.median(step["cpu"] for step in candidate.steps[SKIPPED:])
        cells = [candidate.by, f"{cpu:.3f}", "", "", *(f"{memory[name] / 2**20:.2f}" for name in ("rest", "peak"))]
        both = list(zip(ours.steps, candidate.steps, strict=True))
        if candidate is not ours:
            for place, name in ((2, "cpu"), (3, "seconds")):
                cells[place] = f"{statistics.median(a[name] / b[name] for a, b in both[SKIPPED:]):.2f}"
        far = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in both)
        cells += [f"{candidate.steps[-1]['loss']:.7f}", "" if candidate is ours else f"{far:.1e}"]
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--folder", default=None, help="on the disk that is measured")
    parser.add_argument("--what", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--turns", type=int, default=8)
    options, arguments = parser.parse_known_args()
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, load {os.getloadavg()[0]:.0f}, {' '.join(arguments)}\n")
    for what in options.what:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            table(options.peer, what, options.turns, [*arguments, "--folder", folder])
    print(f"load at the end: {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
