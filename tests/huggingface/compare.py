"""Runs the programs of this folder under the real accelerate and under Paceline, and compares them step by step.

    make huggingface [ARGS="--only trl --procs 2"]

Two environments are needed, which differ in one thing: the first has accelerate, the second has Paceline in its place.
A case is a program with options (`cases.py`). It runs under both at each number of processes; a case that resumes runs a
second time, each library from the checkpoint that the OTHER one saved. All numbers of all ranks are compared: losses,
norms, learning rates, predictions, sums and norms of all weights, and the names of the files that were written.
A case with a plan of Paceline's own is compared with one process of the real library. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import CASES, Case

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 600.0


class NotEndedError(RuntimeError):
    """A run that was ended by us.

    Attributes:
        reached: what each rank had written until then.
    """

    def __init__(self, message: str, reached: list[Any]) -> None:
        super().__init__(message)
        self.reached = reached


@dataclass(frozen=True)
class Library:
    """One side of the comparison.

    Attributes:
        name: "real" or "ours".
        python: the interpreter of its environment.
        deepspeed: a folder of packages with the real DeepSpeed; None where there is none.
    """

    name: str
    python: str
    deepspeed: str | None = None

    def lacks(self, case: Case) -> str:
        """Why a case cannot run here; empty if it can."""
        if not os.path.exists(self.python):
            return f"there is no {self.python}, see `make huggingface`"
        if case.needs_deepspeed and self.deepspeed is not None and not os.path.isdir(self.deepspeed):
            return f"there is no real DeepSpeed in {self.deepspeed}"
        return ""

    def procs(self, case: Case, procs: int) -> int:
        """How many processes this side starts."""
        return 1 if case.alone and self.name == "real" else procs

    def command(self, case: Case, procs: int) -> list[str]:
        """How its users start a script."""
        bin_folder = Path(self.python).parent
        if self.name == "ours":
            words = [str(bin_folder / "paceline"), "launch", "--compat", case.doors, "--cpu", "-n", str(procs)]
            return [*words, *case.plan, *case.launch]
        if procs > 1 or case.runner:
            # `accelerate launch --cpu --num_processes 2` starts one process; torchrun starts two, which learn of the CPU below.
            words = [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(procs)]
            return [*words, *([str(PROGRAMS / f"{case.runner}.py")] if case.runner else [])]
        words = [str(bin_folder / "accelerate"), "launch", "--cpu", "--num_machines", "1", "--dynamo_backend", "no"]
        return [*words, "--num_processes", "1", *(case.launch or ("--mixed_precision", "no"))]

    def environment(self, case: Case, folder: Path) -> dict[str, str]:
        """Variables of its processes."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"PYTHONHASHSEED": "0", "HF_HOME": str(folder.parent / "hf")}
        if not case.needs_deepspeed:
            # With it the real library would train plain replicas in place of DeepSpeed's engine.
            variables["ACCELERATE_USE_CPU"] = "true"
        if case.launch:
            variables["ACCELERATE_MIXED_PRECISION"] = case.launch[1]
        if case.needs_deepspeed:
            variables["DS_ACCELERATOR"] = "cpu"
        if case.needs_deepspeed and self.deepspeed is not None:
            inherited = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
            variables["PYTHONPATH"] = os.pathsep.join([*inherited, self.deepspeed])
        return variables

    def run(
        self, case: Case, procs: int, folder: Path, options: dict[str, Any], limit_s: float
    ) -> tuple[list[Any], float]:
        """One run: what each rank wrote, and the seconds from the command to its end.

        Raises:
            NotEndedError: it did not end within `limit_s`. RuntimeError: it ended with another exit code than 0.
        """
        procs = self.procs(case, procs)
        for old in folder.glob("rank_*.json"):
            old.unlink()
        if self.name == "real":
            options = {**options, **case.reference}
        words = [*self.command(case, procs), str(PROGRAMS / f"{case.program}.py"), str(folder), json.dumps(options)]
        begin = time.perf_counter()
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                words,
                env=self.environment(case, folder),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                # The ranks too, which a launcher that hangs would leave behind.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                reached = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank_*.json"))]
                raise NotEndedError(f"{self.name}: it did not end within {limit_s:.0f} s", reached) from None
        seconds = time.perf_counter() - begin
        if code:
            lines = (folder / "output.txt").read_text(encoding="utf-8").splitlines()
            # torchrun's own report comes last, and says nothing of the cause.
            errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
            shown = "\n".join(errors[:4] or lines[-12:])
            raise RuntimeError(f"{self.name}: exit code {code}, see {folder / 'output.txt'}\n{shown}")
        paths = [folder / f"rank_{rank}.json" for rank in range(procs)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths], seconds


def differences(ours: Any, real: Any, where: str = "") -> list[tuple[float, str]]:
    """Where two results differ, each with its relative difference (infinite for another shape or kind)."""
    if isinstance(real, dict) and isinstance(ours, dict):
        missing = [f"{where}/{key} is there once" for key in sorted(real.keys() ^ ours.keys())]
        wrong = [(float("inf"), text) for text in missing]
        for key in real.keys() & ours.keys():
            wrong += differences(ours[key], real[key], f"{where}/{key}")
        return wrong
    if "/weights/" in where and isinstance(real, list) and isinstance(ours, list) and real and ours:
        # Sum and norm of a tensor: the sum may be near zero, so that the norm is what a difference is held against.
        scale = max(real[-1], ours[-1], 1e-2)
        largest = max(abs(mine - theirs) for mine, theirs in zip(ours, real, strict=True)) / scale
        return [(largest, f"{where}: {ours} instead of {real}")] if largest else []
    if isinstance(real, list) and isinstance(ours, list):
        if len(real) != len(ours):
            return [(float("inf"), f"{where}: {len(ours)} values, {len(real)} there: {ours} instead of {real}"[:400])]
        wrong = []
        for place, (mine, theirs) in enumerate(zip(ours, real, strict=True)):
            wrong += differences(mine, theirs, f"{where}[{place}]")
        return wrong
    if isinstance(real, int | float) and isinstance(ours, int | float):
        if ours == real:
            return []
        # Sums of many weights may be near zero: what counts there is the size of the weights.
        scale = max(abs(real), abs(ours), 1e-2)
        return [(abs(ours - real) / scale, f"{where}: {ours} instead of {real}")]
    return [] if ours == real else [(float("inf"), f"{where}: {ours!r} instead of {real!r}")]


def differences_of_runs(case: Case, results: dict[str, list[Any]]) -> list[tuple[float, str]]:
    """Where the ranks of two runs differ."""
    real = results["real"]
    if case.alone:
        # One process stands for every rank.
        real = real * len(results["ours"])
    wrong: list[tuple[float, str]] = []
    for rank, (own, expected) in enumerate(zip(results["ours"], real, strict=True)):
        keys = expected.keys() if expected.get("is_partial") else expected.keys() | own.keys()
        # A Trainer's rank 0 alone writes the weights.
        has_weights = rank == 0 or not case.alone
        left_out = case.differs.keys() | {"is_partial"} | (set() if has_weights else {"weights"})
        for key in sorted(keys - left_out):
            value = own.get(key)
            if expected.get("is_partial"):
                value = value[: len(expected[key])]
            wrong += differences(value, expected.get(key), f"[{rank}]/{key}")
    return wrong


def compare(case: Case, procs: int, libraries: list[Library], folder: Path) -> tuple[str, list[str], list[str]]:
    """A row of the table, what differs, and what has to be said beside it."""
    folders = {library.name: folder / library.name for library in libraries}
    for own_folder in folders.values():
        own_folder.mkdir(parents=True)
    results: dict[str, list[Any]] = {}
    seconds: dict[str, float] = {}
    for library in libraries:
        name = library.name
        results[name], seconds[name] = library.run(case, procs, folders[name], case.options, LIMIT_S)
    wrong = differences_of_runs(case, results)
    notes = [f"not compared: {key}, since {reason}" for key, reason in case.differs.items()]
    if case.resume is not None:
        if case.resume_real:
            shutil.rmtree(folders["ours"])
            shutil.copytree(folders["real"], folders["ours"])
        elif not case.resume_own:
            # Each goes on from the other's checkpoint.
            aside = folder / "aside"
            shutil.move(folders["real"], aside)
            shutil.move(folders["ours"], folders["real"])
            shutil.move(aside, folders["ours"])
        options = {**case.options, **case.resume}
        for library in libraries:
            name = library.name
            is_bounded = bool(case.bound_s) and name == "real"
            try:
                results[name], _ = library.run(
                    case, procs, folders[name], options, case.bound_s if is_bounded else LIMIT_S
                )
            except NotEndedError as error:
                if not is_bounded:
                    raise
                results["real"] = error.reached
                notes.append(f"the resumed run: {error}; what it had reached until then is compared")
        wrong += [(size, f"resumed{text}") for size, text in differences_of_runs(case, results)]
    largest = max((size for size, _ in wrong), default=0.0)
    too_large = [text for size, text in sorted(wrong, reverse=True) if size > case.tolerance]
    return f"{seconds['real']:.1f} | {seconds['ours']:.1f} | {largest:.1e}", too_large, notes


def main() -> int:
    """Prints a table as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default=".venv-hf-real/bin/python", help="the Python that has accelerate")
    parser.add_argument("--ours", default=".venv-hf-ours/bin/python", help="the Python that has Paceline")
    parser.add_argument(
        "--deepspeed", default=".venv-hf-deepspeed", help="a folder of packages with the real DeepSpeed"
    )
    parser.add_argument("--only", default="", help="only cases with this text in their names")
    parser.add_argument("--procs", type=int, help="only this number of processes")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run nothing")
    parser.add_argument("--keep", help="a folder for everything that the runs write")
    args = parser.parse_args()
    chosen = []
    for case in CASES:
        widths = [procs for procs in case.procs if args.procs in (None, procs)]
        chosen += [(case, procs) for procs in widths if args.only in case.name]
    if not chosen:
        parser.error(f"no case has {args.only!r} in its name and runs on that number of processes: see --list")
    if args.list:
        print("\n".join(f"{case.name} ({procs})" for case, procs in chosen))
        return 0
    libraries = [
        Library("real", os.path.abspath(args.real), os.path.abspath(args.deepspeed)),
        Library("ours", os.path.abspath(args.ours)),
    ]
    base = Path(args.keep or tempfile.mkdtemp())
    failed = 0
    print("| case | processes | seconds, real | seconds, ours | largest difference | |\n|---|---|---|---|---|---|")
    for case, procs in chosen:
        lacking = [library.lacks(case) for library in libraries if library.lacks(case)]
        if lacking:
            print(f"| {case.name} | {procs} | | | | skipped: {'; '.join(lacking)} |")
            continue
        folder = base / f"{case.name.replace(' ', '_').replace(',', '')}_{procs}"
        shutil.rmtree(folder, ignore_errors=True)
        notes: list[str] = []
        try:
            row, wrong, notes = compare(case, procs, libraries, folder)
        except (RuntimeError, OSError) as error:
            row, wrong = "| | ", [str(error)]
        failed += bool(wrong)
        print(f"| {case.name} | {procs} | {row} | {'DIFFERS' if wrong else 'same'} |", flush=True)
        for text in [*notes, *wrong[:6]]:
            print(f"    {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
