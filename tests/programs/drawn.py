"""Compares drawn programs for DeepSpeed (`drawn_loop`) on two processes with the real library: losses, rates, norms, weights.

    PYTHONPATH=tests python -m programs.drawn --deepspeed FOLDER [--seeds 0 39]

FOLDER has the real DeepSpeed; where it is not there, nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from programs.drawn_choices import draw

HERE = Path(__file__).parent
BATCH = 20  # programs of one launch
LIMIT_S = 900  # of one launch
# Of values, relative to the largest of their kind: of 16 bits each library rounds at other places.
TOLERANCE = 2e-5
TOLERANCE_16_BITS = 3e-2


def run(side: str, first: int, last: int, deepspeed: str, output: Path, procs: int) -> str:
    """Runs the programs of some seeds under one library; returns what was printed."""
    libraries = [deepspeed] if side == "real" else map(str, sorted((HERE.parents[1] / "packages").glob("*/src")))
    variables = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PROGRAMS_RECORD": str(output),
        "PYTHONPATH": os.pathsep.join([str(HERE / "shim"), *libraries]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    words = [str(HERE / "drawn_loop.py"), str(output), str(first), str(last)]
    if side == "ours":
        command = [sys.executable, "-m", "paceline", "deepspeed", "--num_gpus", str(procs), *words]
        return _printed([_started(command, variables)])
    # DeepSpeed's launcher would import all of it twice more.
    variables.update(WORLD_SIZE=str(procs), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(procs)]
    return _printed([_started([sys.executable, *words], {**variables, **rank}) for rank in ranks])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _started(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _printed(processes: list[subprocess.Popen[str]]) -> str:
    """Waits for processes, and returns what they have printed. Where one has failed, the others may wait for it for ever."""
    printed = ""
    for process in processes:
        try:
            printed += process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            printed += process.communicate()[0]
    return printed


def read(output: Path, seed: int, procs: int) -> list[dict[str, Any]]:
    """Returns what each rank has seen; an empty list where a rank has written nothing."""
    files = [output / f"{seed}-{rank}.json" for rank in range(procs)]
    if not all(file.exists() for file in files):
        return []
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def apart(real: Any, ours: Any) -> float:
    """Returns the largest difference of two nested lists of numbers, relative to the largest number; infinity if they
    differ in length, or in what is not finite."""
    pairs = list(_pairs(real, ours))
    largest = max((abs(a) for a, _ in pairs if a is not None and math.isfinite(a)), default=0.0)
    found = 0.0
    for a, b in pairs:
        if a is None or b is None:
            # DeepSpeed has no norm where nothing asks for one.
            if a is not None and a != b:
                return math.inf
            continue
        if not (math.isfinite(a) and math.isfinite(b)):
            if math.isfinite(a) != math.isfinite(b):
                return math.inf
            continue
        found = max(found, abs(a - b) / max(largest, 1e-12))
    return found


def _pairs(real: Any, ours: Any) -> Any:
    if isinstance(real, list) and isinstance(ours, list):
        if len(real) != len(ours):
            yield math.inf, 0.0
            return
        for a, b in zip(real, ours, strict=True):
            yield from _pairs(a, b)
        return
    yield real, ours


def compare(real: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """Returns an error, or "" and the differences."""
    for side, ranks in (("real", real), ("ours", ours)):
        if not ranks:
            return f"{side}: nothing was written", {}
        for rank in ranks:
            if "error" in rank:
                return f"{side}: {rank['error'][:400]}", {}
    differences = {key: apart(real[0][key], ours[0][key]) for key in real[0] if key != "losses"}
    means = [
        [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
        for ranks in (real, ours)
    ]
    return "", {"losses": apart(*means), **differences, "skipped": real[0]["counters"][-1][1]}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", required=True, help="a folder of packages with the real DeepSpeed")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 39), help="the first and the last")
    parser.add_argument("--procs", type=int, default=2, help="processes of each program")
    parser.add_argument(
        "--keep", type=Path, help="a folder for what both sides have seen; a real side that is there is kept"
    )
    args = parser.parse_args()
    if not (Path(args.deepspeed) / "deepspeed").is_dir():
        print(f"skipped: {args.deepspeed}/deepspeed is not there")
        return 0
    counts = {"equal": 0, "differs": 0, "refused there": 0}
    first, last = args.seeds
    for begin in range(first, last + 1, BATCH):
        end = min(begin + BATCH - 1, last)
        with tempfile.TemporaryDirectory() as scratch:
            for seed, error, differences in compared(args, begin, end, args.keep or Path(scratch)):
                told = ", ".join(f"{key} {value:.0e}" if value else f"{key} 0" for key, value in differences.items())
                outcome = "equal"
                if error.startswith("real"):
                    outcome = "refused there"
                elif error or is_apart(differences, seed):
                    outcome = "differs"
                counts[outcome] += 1
                print(f"{seed} {outcome}: {error or told}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return 1 if counts["differs"] else 0


def compared(
    args: argparse.Namespace, begin: int, end: int, folder: Path
) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Runs the programs of some seeds under both libraries; yields each seed, an error or "", and the differences."""
    outputs = [folder / f"{side}-{args.procs}" for side in ("real", "ours")]
    for side, output in zip(("real", "ours"), outputs, strict=True):
        output.mkdir(parents=True, exist_ok=True)
        if side == "real" and all(read(output, seed, args.procs) for seed in range(begin, end + 1)):
            continue
        printed = run(side, begin, end, args.deepspeed, output, args.procs)
        if not read(output, end, args.procs):
            print(f"{side}: {printed[-1500:]}")
    for seed in range(begin, end + 1):
        error, differences = compare(*(read(output, seed, args.procs) for output in outputs))
        yield seed, error, differences


def is_apart(differences: dict[str, float], seed: int) -> bool:
    """Returns whether two outcomes differ by more than rounding."""
    exact = ("scales", "counters", "skipped")
    rounded = max(value for key, value in differences.items() if key not in exact)
    return bool(rounded > tolerance(seed) or differences["scales"] or differences["counters"])


def tolerance(seed: int) -> float:
    """Returns the largest difference that rounding makes in a program."""
    program = draw(seed)
    halves = program["precision"] != "fp32" or program["config"].get("communication_data_type", "fp32") != "fp32"
    return TOLERANCE_16_BITS if halves else TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
