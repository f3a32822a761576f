"""What one process of `bench_transformers.py` trains: a command like run_clm, or like run_clm_no_trainer.

    python transformers_program.py trainer|loop STEPS FILE [--turns READ WRITE --first]

Its imports come first, as in those scripts: a launcher may use that.
FILE gets when the first step ended, the CPU time until then (this process and the launcher), the time of a step, and each turn.

With `--turns`, two programs run in turns of 10 steps, and the other one waits: READ and WRITE are named pipes. Whatever else
the machine does, it then slows both of them.
"""

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

# isort: split
# Last, since a launcher imports no module of a script's own ahead of it.
from bench_transformers import BATCH, LENGTH, token_rows

WARM_STEPS = 10
TURN_STEPS = 10


def language_model() -> Any:
    """GPT-2 of 2 layers."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": 258}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))


class Turns:
    """Gives the machine to another program and takes it back, through two named pipes.

    Ranks: the first; the others wait for it in their next collective call.

    Args:
        read, write: paths of the pipes; they are the other way round in the other program.
        first: whether this program has the first turn.
    """

    def __init__(self, read: str, write: str, first: bool) -> None:
        # Opening a pipe waits for its other end, so that the two programs must open them in the same order.
        if first:
            self._write = os.open(write, os.O_WRONLY)
            self._read = os.open(read, os.O_RDONLY)
        else:
            self._read = os.open(read, os.O_RDONLY)
            self._write = os.open(write, os.O_WRONLY)
            os.read(self._read, 1)

    def give(self) -> None:
        """Lets the other program go on."""
        os.write(self._write, b"x")

    def wait(self) -> None:
        """Waits for this program's turn; returns at once when the other program has ended."""
        os.read(self._read, 1)


class Clock:
    """Notes when steps end, by the clock and by this process's CPU time.

    Args:
        steps: how many steps the program takes.
        turns: the pipes and `first` of `Turns`, or None to run alone.
    """

    def __init__(self, steps: int, turns: tuple[str, str, bool] | None) -> None:
        self.steps = steps
        self.ends: list[float] = []
        self.launcher_cpu = 0.0
        self.first_cpu = 0.0
        # Of each turn: when it ended, in seconds from the first step, and the seconds of one of its steps.
        self.turns: list[tuple[float, float]] = []
        self._turn_arguments = turns if is_first_rank() else None
        self._other: Turns | None = None
        self._turn_begin = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all steps were taken."""
        return len(self.ends) == self.steps

    def step(self) -> None:
        """A step has ended."""
        self.ends.append(time.time())
        if len(self.ends) == 1:
            self.first_cpu = time.process_time()
            self.launcher_cpu = launcher_cpu_s()
        if self._turn_arguments is not None and len(self.ends) >= WARM_STEPS:
            self._take_turns(*self._turn_arguments)

    def _take_turns(self, read: str, write: str, first: bool) -> None:
        """Ends this program's turn after ten steps."""
        if self._other is None:
            self._other = Turns(read, write, first)
            self._turn_begin = time.time()
        elif (len(self.ends) - WARM_STEPS) % TURN_STEPS == 0:
            now = time.time()
            self.turns.append((now - self.ends[0], (now - self._turn_begin) / TURN_STEPS))
            # After the last turn of both, nobody is left to read what the second program would write.
            if first or not self.is_over:
                self._other.give()
            if not self.is_over:
                self._other.wait()
            self._turn_begin = time.time()

    def write(self, path: str) -> None:
        """What the first process took: until the end of its first step, for a step, and for each turn."""
        if not is_first_rank():
            return
        seconds = [later - earlier for earlier, later in pairwise(self.ends[WARM_STEPS:])]
        measured = {
            "first": self.ends[0],
            "start, CPU": self.first_cpu + self.launcher_cpu,
            "step": statistics.median(seconds),
            "turns": self.turns,
        }
        Path(path).write_text(json.dumps(measured))


def is_first_rank() -> bool:
    """Whether this process has rank 0."""
    return os.environ.get("RANK", "0") == "0"


def launcher_cpu_s() -> float:
    """CPU time of the process that started this one, until now; Linux."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def train_with_trainer(clock: Clock, folder: str) -> None:
    """What run_clm does."""

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    arguments = TrainingArguments(
        output_dir=folder, max_steps=clock.steps, per_device_train_batch_size=BATCH, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(
        model=language_model(), args=arguments, train_dataset=token_rows(), data_collator=default_data_collator,
        callbacks=[Steps()],
    ).train()  # fmt: skip


def train_with_loop(clock: Clock, folder: str) -> None:
    """What run_clm_no_trainer does."""
    accelerator = Accelerator(cpu=True)
    model = language_model()
    loader = DataLoader(token_rows(), shuffle=True, collate_fn=default_data_collator, batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 0, clock.steps * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    while not clock.is_over:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            clock.step()
            if clock.is_over:
                break
    accelerator.end_training()


def main() -> None:
    """Trains, and writes what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["trainer", "loop"])
    parser.add_argument("steps", type=int)
    parser.add_argument("path")
    parser.add_argument("--turns", nargs=2)
    parser.add_argument("--first", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    turns = None
    if given.turns:
        turns = (given.turns[0], given.turns[1], given.first)
    clock = Clock(given.steps, turns)
    train = train_with_trainer if given.kind == "trainer" else train_with_loop
    train(clock, str(Path(given.path).parent))
    clock.write(given.path)
    # accelerate leaves the group of `Trainer` open, and a thread of gloo then aborts a process that ends, at times.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
