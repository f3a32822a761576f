"""What people of Hugging Face's libraries wait for, under accelerate and under Paceline, in turns.

    make huggingface                        (makes both environments, .venv-hf-real and .venv-hf-ours)
    python benchmarks/bench_transformers.py [--real PYTHON] [--ours PYTHON] [--turns 5] [--parts start loader metrics]

The environments differ in one thing: the first has accelerate, the second has Paceline in its place. Parts:

    start    a command like that of run_clm (`Trainer`) and of run_clm_no_trainer (a loop), on 1 and 2 processes: seconds from
             the command to the end of the first step, and the time of one step; both also by CPU time, which other work
             changes less
    loader   the time of one step of an empty loop over a prepared loader, through accelerate's names and natively
    metrics  one call of `gather_for_metrics` on one process

Ratios are those of each turn: the median, and the quartiles. Model and text are small: GPT-2 of 2 layers with random weights,
and the standard library's source.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("transformers_program.py")
LENGTH, BATCH, ROWS, STEPS = 64, 4, 400, 210
LOADER_BATCHES, CALLS, TRIALS = 1000, 2000, 7

# -- what one process does -----------------------------------------------------------------------------------------


def token_rows() -> list[dict[str, list[int]]]:
    """Pieces of a text as rows of bytes, as run_clm groups them."""
    text = list(Path(os.__file__).read_bytes())
    rows = []
    for number in range(ROWS):
        start = number * LENGTH % (len(text) - LENGTH)
        tokens = [2 + byte for byte in text[start : start + LENGTH]]
        rows.append({"input_ids": tokens, "attention_mask": [1] * LENGTH, "labels": tokens})
    return rows


def accelerator_of(side: str) -> Any:
    """An `Accelerator` on one process: accelerate's, ours through its names, or ours."""
    if side == "native":
        from paceline import Accelerator
    else:
        from accelerate import Accelerator  # type: ignore[assignment]
    return Accelerator(cpu=True)


class Indices:
    """Gives back what it is asked for: reading costs nothing, so that the loop itself is what is measured."""

    def __len__(self) -> int:
        return 8 * LOADER_BATCHES

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class OneBatch:
    """A collation that costs nothing: always the same batch."""

    def __init__(self) -> None:
        import torch

        self.batch = {"input_ids": torch.zeros(8, 1), "labels": torch.zeros(8, 1)}

    def __call__(self, rows: list[int]) -> Any:
        return self.batch


def empty_loops() -> Iterator[tuple[str, Any]]:
    """Loaders whose loops are measured."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import default_data_collator

    yield "nothing to read", DataLoader(Indices(), 8, shuffle=True, collate_fn=OneBatch())  # type: ignore[arg-type]
    features, labels = torch.randn(8 * LOADER_BATCHES, 10), torch.randint(0, 5, (8 * LOADER_BATCHES,))
    yield "two tensors, batch 8, torch's collation", DataLoader(TensorDataset(features, labels), 8, shuffle=True)
    rows = token_rows()
    rows = rows * (LOADER_BATCHES * BATCH // len(rows))
    collate = {"collate_fn": default_data_collator}
    yield "run_clm's rows, batch 4, transformers' collation", DataLoader(rows, BATCH, shuffle=True, **collate)  # type: ignore[arg-type]


def measure_loaders(side: str) -> dict[str, Any]:
    """Microseconds of a step of each empty loop: plain and prepared."""
    accelerator = accelerator_of(side)
    measured = {}
    for name, loader in empty_loops():
        prepared = accelerator.prepare(loader)
        epochs: tuple[Callable[[], object], ...] = (lambda loader=loader: _exhaust(loader), lambda: _exhaust(prepared))  # noqa: B023
        measured[name] = [best / LOADER_BATCHES * 1e6 for best in _best(epochs)]
    return measured


def _exhaust(loader: Any) -> None:
    for _ in loader:
        pass


def _best(works: tuple[Callable[[], object], ...]) -> list[float]:
    """The shortest CPU time of each, over trials in turns: nothing here waits, and other work then counts less."""
    best = [float("inf")] * len(works)
    for _ in range(TRIALS):
        for number, work in enumerate(works):
            gc.collect()
            begin = time.process_time()
            work()
            best[number] = min(best[number], time.process_time() - begin)
    return best


def measure_metrics(side: str) -> dict[str, Any]:
    """Microseconds of a call in the middle of an epoch."""
    import torch
    from torch.utils.data import DataLoader

    accelerator = accelerator_of(side)
    loader = accelerator.prepare(DataLoader(torch.arange(64.0).view(16, 4), batch_size=4))  # type: ignore[arg-type]
    batch = next(iter_of := iter(loader))
    values: dict[str, Any] = {"one tensor": batch, "two tensors": (batch, batch.argmax(dim=1))}
    measured = {}
    for name, value in values.items():
        best = _best((lambda value=value: [accelerator.gather_for_metrics(value) for _ in range(CALLS)],))
        measured[name] = best[0] / CALLS * 1e6
    del iter_of
    return measured


def work(kind: str, side: str, path: str) -> None:
    """One process of one side; writes what it measured."""
    import torch

    torch.set_num_threads(1)
    if side == "door":
        from paceline.compat import install

        install(["accelerate"])
    measure = measure_loaders if kind == "loader" else measure_metrics
    Path(path).write_text(json.dumps(measure(side)))


# -- both sides ----------------------------------------------------------------------------------------------------


class Environments:
    """The Python of each side, and how its users start a script."""

    def __init__(self, real: str, ours: str, folder: str) -> None:
        self.pythons = {"real": real, "ours": ours}
        self.path = str(Path(folder, "measured.json"))
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        self._environment |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
        # Users keep compiled modules: pip compiles what it installs. The modules of a checkout are compiled at their first
        # import, and with this variable at each one: our 320 modules then add a fifth to each start.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def launched(self, library: str, procs: int) -> list[str]:
        """The words before the script; "bare" is Python with accelerate, and no launcher."""
        if library == "bare":
            return [self.pythons["real"]]
        python = self.pythons[library]
        folder = Path(python).parent
        if library == "ours":
            return [str(folder / "paceline"), "launch", "--compat", "accelerate", "--cpu", "-n", str(procs)]
        if procs > 1:
            # `accelerate launch --cpu --num_processes 2` starts one process; torchrun starts two.
            return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(procs)]
        words = [str(folder / "accelerate"), "launch", "--cpu", "--num_machines", "1", "--num_processes", "1"]
        return [*words, "--dynamo_backend", "no", "--mixed_precision", "no"]

    def run(self, words: list[str]) -> dict[str, Any]:
        """What one command measured; "start" is the time from the command to the end of its first step."""
        Path(self.path).unlink(missing_ok=True)
        used_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.time()
        ended = subprocess.run(
            [*words, self.path], env=self._environment, check=False, capture_output=True, text=True, timeout=600
        )
        if ended.returncode:
            raise SystemExit(
                f"{' '.join(words)}: exit code {ended.returncode}\n{(ended.stdout + ended.stderr)[-2000:]}"
            )
        measured: dict[str, Any] = json.loads(Path(self.path).read_text())
        if "first" in measured:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            measured["start"] = measured["first"] - begin
            measured["command, CPU"] = used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime
        return measured


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{statistics.median(ordered):.2f} ({ordered[quarter]:.2f} .. {ordered[-1 - quarter]:.2f})"


def compare_commands(environments: Environments, turns: int) -> None:
    """Rows for each command: its start and its step, by the clock and by CPU time, which other work changes less."""
    print("| command | processes | what | accelerate | Paceline | ratio | at most |\n|---|---|---|---|---|---|---|")
    for library in environments.pythons:
        # Not measured: what is imported for the first time is compiled, and read from the disk.
        environments.run([*environments.launched(library, 1), str(PROGRAM), "trainer"])
    for kind, name in (("trainer", "run_clm, Trainer"), ("loop", "run_clm_no_trainer")):
        for procs in (1, 2):
            libraries = ["real", "bare", "ours"] if procs == 1 else ["real", "ours"]
            measured: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
            for turn in range(turns):
                for library in libraries if turn % 2 else libraries[::-1]:
                    measured[library].append(
                        environments.run([*environments.launched(library, procs), str(PROGRAM), kind])
                    )
            rows = {
                "start": ("to the first step", 1.0, "s", "0.50" if procs == 1 else "0.70"),
                "start, CPU": ("to the first step, CPU time of the launcher and one process", 1.0, "s", ""),
                "command, CPU": ("CPU time of the whole command", 1.0, "s", ""),
                "mean step": (f"one step, mean of {STEPS}", 1e3, "ms", "0.97"),
                "mean step, CPU": (f"one step, mean of {STEPS}, CPU time", 1e3, "ms", ""),
                "step": ("one step, median", 1e3, "ms", "0.97"),
                "step, CPU": ("one step, median, CPU time", 1e3, "ms", ""),
            }
            for field, (what, scale, unit, limit) in rows.items():
                values = {library: [run[field] for run in runs] for library, runs in measured.items()}
                ratios = [ours / real for ours, real in zip(values["ours"], values["real"], strict=True)]
                real, ours = (
                    f"{statistics.median(values[library]) * scale:.2f} {unit}" for library in ("real", "ours")
                )
                print(f"| {name} | {procs} | {what} | {real} | {ours} | {spread(ratios)} | {limit} |", flush=True)
            if procs == 1:
                print_start_without_launcher(name, measured)


def print_start_without_launcher(name: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """A row with what the imports and the first step take alone: a launcher cannot be faster without changing those."""
    real = [run["start"] for run in measured["real"]]
    bare = [run["start"] for run in measured["bare"]]
    ratios = [alone / launched for alone, launched in zip(bare, real, strict=True)]
    what = "to the first step: `python` with accelerate and no launcher, in place of Paceline"
    seconds = f"{statistics.median(real):.2f} s | {statistics.median(bare):.2f} s"
    print(f"| {name} | 1 | {what} | {seconds} | {spread(ratios)} | |", flush=True)


def compare_calls(environments: Environments, kind: str, turns: int) -> None:
    """A row for each thing that is measured within one process."""
    sides = {"real": "real", "door": "ours", "native": "ours"}
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(turns):
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            measured[side].append(
                environments.run(
                    [environments.pythons[sides[side]], __file__, "--work", kind, "--side", side, "--path"]
                )
            )
    must = "0.75" if kind == "loader" else "10 us"
    print(f"| {kind} | through | plain | prepared | of accelerate's | at most |\n|---|---|---|---|---|---|")
    for name in measured["real"][0]:
        by_side = {side: [_as_pair(run[name]) for run in runs] for side, runs in measured.items()}
        for side, pairs in by_side.items():
            plain, prepared = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratios = [ours[1] / real[1] for ours, real in zip(pairs, by_side["real"], strict=True)]
            shown = f"{plain:.1f} us" if kind == "loader" else ""
            limit = "" if side == "real" else must
            label = {"real": "accelerate", "door": "its names here", "native": "natively"}[side]
            print(f"| {name} | {label} | {shown} | {prepared:.1f} us | {spread(ratios)} | {limit} |", flush=True)


def _as_pair(value: Any) -> tuple[float, float]:
    return (0.0, value) if isinstance(value, float) else (value[0], value[1])


def main() -> None:
    """Prints a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default=".venv-hf-real/bin/python", help="the Python that has accelerate")
    parser.add_argument("--ours", default=".venv-hf-ours/bin/python", help="the Python that has Paceline in its place")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["start", "loader", "metrics"])
    for hidden in ("--work", "--side", "--path"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.side, given.path)
        return
    for python in (given.real, given.ours):
        if not Path(python).exists():
            parser.error(f"there is no {python}: run `make huggingface`, or name the two environments")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, one thread a process, {given.turns} turns\n")
    with tempfile.TemporaryDirectory() as folder:
        environments = Environments(str(Path(given.real).absolute()), str(Path(given.ours).absolute()), folder)
        if "start" in given.parts:
            compare_commands(environments, given.turns)
        for kind in ("loader", "metrics"):
            if kind in given.parts:
                print()
                compare_calls(environments, kind, given.turns)


if __name__ == "__main__":
    main()
