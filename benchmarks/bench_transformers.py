"""What people of Hugging Face's libraries wait for, under accelerate and under Paceline, in turns.

    make huggingface                        (makes both environments, .venv-hf-real and .venv-hf-ours)
    python benchmarks/bench_transformers.py [--real PYTHON] [--ours PYTHON] [--turns 5] [--parts start steps loader metrics]

The environments differ in one thing: the first has accelerate, the second has Paceline in its place. Parts:

    start    a command like that of run_clm (`Trainer`) and of run_clm_no_trainer (a loop), on 1 and 2 processes: seconds from
             the command to the end of the first step, also by CPU time, which other work changes less
    steps    the time of a step of these commands. Both libraries train at the same time, in turns of 10 steps, so that other
             work on the machine slows both
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
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("transformers_program.py")
LENGTH, BATCH, ROWS = 64, 4, 400
START_STEPS, TRIAL_STEPS = 20, 100
# Both programs together train for so long, in seconds.
TRAINED_S = 30.0
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
        begin = time.time()
        measured = self._measured(words, self.path, [])
        if "first" in measured:
            measured["start"] = measured["first"] - begin
        return measured

    def run_in_turns(self, commands: dict[str, list[str]]) -> dict[str, list[tuple[float, float]]]:
        """The turns of two commands that train at the same time: seconds from the first step, and seconds of a step."""
        with tempfile.TemporaryDirectory() as folder:
            pipes = [f"{folder}/pipe{number}" for number in range(2)]
            for pipe in pipes:
                os.mkfifo(pipe)
            options = [["--turns", *pipes, "--first"], ["--turns", *pipes[::-1]]]
            paths = [f"{folder}/{library}.json" for library in commands]
            with ThreadPoolExecutor(2) as pool:
                measured = list(pool.map(self._measured, commands.values(), paths, options))
        return {library: values["turns"] for library, values in zip(commands, measured, strict=True)}

    def _measured(self, words: list[str], path: str, options: list[str]) -> dict[str, Any]:
        """What a program wrote to the file that is its last argument but for the options."""
        Path(path).unlink(missing_ok=True)
        command = [*words, path, *options]
        ended = subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            output = ended.stdout + ended.stderr
            raise SystemExit(f"{' '.join(command)}: exit code {ended.returncode}\n{output[-2000:]}")
        values: dict[str, Any] = json.loads(Path(path).read_text())
        return values


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{statistics.median(ordered):.2f} ({ordered[quarter]:.2f} .. {ordered[-1 - quarter]:.2f})"


COMMANDS = {"trainer": "run_clm, Trainer", "loop": "run_clm_no_trainer"}
HEADER = "| command | processes | what | accelerate | Paceline | ratio | at most |\n|---|---|---|---|---|---|---|"


def warm_up(environments: Environments) -> None:
    """Runs each library once, not measured: what is imported for the first time is compiled, and read from the disk."""
    for library in environments.pythons:
        environments.run([*environments.launched(library, 1), str(PROGRAM), "trainer", str(START_STEPS)])


def compare_starts(environments: Environments, turns: int) -> None:
    """Rows for each command: its start, by the clock and by CPU time, which other work changes less."""
    print(HEADER)
    for kind, name in COMMANDS.items():
        for procs in (1, 2):
            libraries = ["real", "bare", "ours"] if procs == 1 else ["real", "ours"]
            measured: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
            for turn in range(turns):
                for library in libraries if turn % 2 else libraries[::-1]:
                    command = [*environments.launched(library, procs), str(PROGRAM), kind, str(START_STEPS)]
                    measured[library].append(environments.run(command))
            rows = {
                "start": ("to the first step", "0.50" if procs == 1 else "0.70"),
                "start, CPU": ("to the first step, CPU time of the launcher and one process", ""),
            }
            for field, (what, limit) in rows.items():
                values = {library: [run[field] for run in runs] for library, runs in measured.items()}
                ratios = [ours / real for ours, real in zip(values["ours"], values["real"], strict=True)]
                real, ours = (f"{statistics.median(values[library]):.2f} s" for library in ("real", "ours"))
                print(f"| {name} | {procs} | {what} | {real} | {ours} | {spread(ratios)} | {limit} |", flush=True)
            if procs == 1:
                print_start_without_launcher(name, measured)


def compare_steps(environments: Environments, turns: int) -> None:
    """A row for each command: one step. A ratio is the median of those of one run's turns."""
    print(HEADER)
    for kind, name in COMMANDS.items():
        for procs in (1, 2):
            trial = environments.run([*environments.launched("real", procs), str(PROGRAM), kind, str(TRIAL_STEPS)])
            steps = int(TRAINED_S / trial["step"] / 2)
            pairs: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]] = []
            for turn in range(turns):
                libraries = ["real", "ours"] if turn % 2 else ["ours", "real"]
                commands = {
                    library: [*environments.launched(library, procs), str(PROGRAM), kind, str(steps)]
                    for library in libraries
                }
                measured = environments.run_in_turns(commands)
                pairs.append((measured["real"], measured["ours"]))
            print_steps(f"{name} | {procs} | one step", pairs)


def print_steps(label: str, pairs: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]) -> None:
    """A row of all turns: times of their ends, in seconds from the start of a run, with the times of a step."""
    medians = []
    for real, ours in pairs:
        # A turn of one library and the next turn of the other are neighbours in time.
        chosen = [(real_step, our_step) for (_, real_step), (_, our_step) in zip(real, ours, strict=True)]
        ratio = statistics.median(our_step / real_step for real_step, our_step in chosen)
        real_ms, our_ms = (statistics.median(steps) * 1e3 for steps in zip(*chosen, strict=True))
        medians.append((real_ms, our_ms, ratio))
    reals, ours_, ratios = map(list, zip(*medians, strict=True))
    milliseconds = f"{statistics.median(reals):.2f} ms | {statistics.median(ours_):.2f} ms"
    print(f"| {label} | {milliseconds} | {spread(ratios)} | 0.97 |", flush=True)


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
    parser.add_argument("--parts", nargs="+", default=["start", "steps", "loader", "metrics"])
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
        if not {"start", "steps"}.isdisjoint(given.parts):
            warm_up(environments)
        if "start" in given.parts:
            compare_starts(environments, given.turns)
        if "steps" in given.parts:
            print()
            compare_steps(environments, given.turns)
        for kind in ("loader", "metrics"):
            if kind in given.parts:
                print()
                compare_calls(environments, kind, given.turns)


if __name__ == "__main__":
    main()
