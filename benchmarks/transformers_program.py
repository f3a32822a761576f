"""What one process of `bench_transformers.py` trains: a command like run_clm, or like run_clm_no_trainer.

    python transformers_program.py trainer|loop FILE

Its imports come first, as in those scripts: a launcher may use that.
FILE gets when the first step ended, the CPU time until then (this process and the launcher), and the time of a step.
"""

import json
import os
import statistics
import sys
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
from bench_transformers import BATCH, LENGTH, STEPS, token_rows

WARM_STEPS = 10


def language_model() -> Any:
    """GPT-2 of 2 layers."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": 258}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))


class Clock:
    """Notes when steps end, by the clock and by this process's CPU time."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.launcher_cpu = 0.0

    def step(self) -> None:
        """A step has ended."""
        self.ends.append(time.time())
        self.cpu_ends.append(time.process_time())
        if len(self.ends) == 1:
            self.launcher_cpu = launcher_cpu_s()

    def write(self, path: str) -> None:
        """What the first process took: until the end of its first step, and for a step."""
        if os.environ.get("RANK", "0") != "0":
            return
        measured = {"first": self.ends[0], "start, CPU": self.cpu_ends[0] + self.launcher_cpu}
        for field, ends in (("step", self.ends), ("step, CPU", self.cpu_ends)):
            seconds = [later - earlier for earlier, later in pairwise(ends)]
            measured[field] = statistics.median(seconds[WARM_STEPS:])
            # The mean has what the median hides, such as collections of garbage: it is what Trainer prints at its end.
            measured[f"mean {field}"] = statistics.fmean(seconds[WARM_STEPS:])
        Path(path).write_text(json.dumps(measured))


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
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True,
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
    scheduler = get_scheduler("linear", optimizer, 0, STEPS * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    while len(clock.ends) < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            clock.step()
            if len(clock.ends) == STEPS:
                break
    accelerator.end_training()


def main() -> None:
    """Trains, and writes what it took."""
    kind, path = sys.argv[1:]
    torch.set_num_threads(1)
    clock = Clock()
    train = train_with_trainer if kind == "trainer" else train_with_loop
    train(clock, str(Path(path).parent))
    clock.write(path)
    # accelerate leaves the group of `Trainer` open, and a thread of gloo then aborts a process that ends, at times.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
