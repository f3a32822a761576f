"""Runs a script as a trial: it times the script's own steps, writes none of its files, and ends it after the last step.

    ScriptNotes   observes a script: its batches, windows and the config that it brings; a rehearsal uses it too
    Trial         does so in one process of a real run: step 1 .. first-1 warm up | first .. last are timed | the end

Both take the place of the run's `Runtime`. A trial is a forked process that does not live on.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.ours import is_our_module
from paceline.launch.job import Target
from paceline.launch.worker.worker import become, leave
from paceline.planner.out_of_memory import is_out_of_memory
from paceline.run.run import Run
from paceline.world import runtime
from paceline.world.runtime import Runtime
from paceline.world.tree import first_rows
from paceline.world.world import World
from paceline_lens.observe.memory import of_process
from paceline_lens.tune.script_config import script_configs

Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ScriptNotes(Runtime):
    """Observes a script.

    Args:
        change: changes a config that the script passes to the engine of another library, before the engine uses it.

    Attributes:
        seen: "config" (the engine's config as the script gave it), "rows" (samples of one micro-batch on
            this rank), "batch" (samples of one step over all ranks), "windows" (whether the loop says where a step's
            micro-batches are), "modules" (what the script imported from libraries).
    """

    def __init__(self, change: Change) -> None:
        self.seen: dict[str, Any] = {"windows": False, "rows": None, "batch": None}
        self._change = change
        self._has_engine = False
        self._run: Run  # known once it begins

    def watch(self, target: Target, compat: str, path: Path) -> None:
        """Runs a script in this process, and writes what was seen to `path`, however the script ends."""
        modules_before = set(sys.modules)
        try:
            become(target, compat)
        finally:
            imported = set(sys.modules) - modules_before
            self.seen["modules"] = sorted(filter(_of_library, imported))
            path.write_text(json.dumps(self.seen, default=str), encoding="utf-8")

    def foreign_config(self, library: str, config: Any) -> Any:
        """Replaces the script's config by a changed one; the config then decides the engine's batches, not a loader."""
        content = script_configs().contents(config)
        self._has_engine = True
        self.seen["config"] = content
        return self._change(content)

    def begin(self, run: Run) -> None:
        """Follows the steps of the run."""
        self._run = run
        run.events.micro_batch.subscribe(self._micro_batch)
        run.events.stepped.subscribe(self.stepped)

    def _micro_batch(self, inputs: object, samples: int) -> None:
        """Notes the first micro-batch of an engine."""
        if self.seen["rows"] is None:
            self.seen["rows"] = first_rows(inputs)
            self.seen["batch"] = samples

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the batch of a step, from the loader that is being iterated."""
        window = self._run.gradients
        self.seen["windows"] = window.declared
        batch = window.batch
        if batch is None or self._has_engine:
            return
        micro_batches = window.steps if window.declared else 1
        # The last batch of an epoch may be smaller than those before it.
        self.seen["rows"] = max(self.seen["rows"] or 0, batch.real[batch.index])
        self.seen["batch"] = max(self.seen["batch"] or 0, sum(batch.real) * micro_batches)


class Trial(ScriptNotes):
    """One process of a trial.

    Args:
        folder: the folder into which this rank writes what was measured, as `rank<n>.json`.
        first, last: the first and the last optimizer step that are timed.
        limit_s: seconds that may pass without a step.
        memory: host memory in bytes that this process may allocate, in addition to what it has; 0 sets no limit.
        change: as in `ScriptNotes`.
    """

    keeps_files = False

    def __init__(self, folder: Path, first: int, last: int, limit_s: float, memory: int, change: Change) -> None:
        super().__init__(change)
        self._first = first
        self._last = last
        self._limit_s = limit_s
        self._memory = memory
        self._folder = folder
        self._times: list[float] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._resident = 0
        self._path: Path  # known in the process of the rank alone, as is what follows
        self._device: torch.device
        self._stacks: TextIO

    def run(self, target: Target, compat: str) -> None:
        """Runs the script up to the last step that is timed, at which the process ends without returning from here."""
        runtime.use(self)
        self._path = self._folder / f"rank{environment.get('RANK')}.json"
        self._limit_memory()
        with self._path.with_suffix(".stack").open("w") as self._stacks:
            self._expect_a_step()
            try:
                become(target.on(environment.get("LOCAL_RANK") or 0), compat)
            except Exception as error:
                if is_out_of_memory(error):
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    self._report("does not fit", why=lines[0])
                raise
            self._report("ended", why=f"the script ended after {len(self._times)} steps")

    def device(self, world: World, *, cpu: bool = False, index: int | None = None) -> torch.device:
        """Returns the device on which the script computes, which may be the CPU of a host with accelerators."""
        self._device = super().device(world, cpu=cpu, index=index)
        return self._device

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Records the time, and ends the process after the last step."""
        super().stepped(optimizer)
        if self._optimizer is None:
            self._optimizer = optimizer
        # A script with several optimizers (a GAN, for example) counts a step when the first of them steps.
        if optimizer is not self._optimizer:
            return
        # The host runs ahead of an accelerator, so that without a synchronization this moment would be too early.
        on_accelerator = self._device.type != "cpu"
        if on_accelerator:
            torch.accelerator.synchronize(self._device)
        self._times.append(time.perf_counter())
        self._expect_a_step()
        if len(self._times) < self._last:
            return
        if on_accelerator:
            peak = torch.accelerator.max_memory_allocated(self._device)
        else:
            peak = of_process("VmHWM") - self._resident
        if dist.is_initialized():
            dist.barrier()  # a rank that ended earlier would take away the store and connections that others still use
        self._report("measured", bytes=peak)
        # An exception would run the script's `finally`, which may save files, or its `except`, which may go on training.
        leave(0)

    def _limit_memory(self) -> None:
        """Makes this process fail, rather than the host, if it allocates more than its share."""
        self._resident = of_process("VmRSS")
        if not self._memory:
            return
        limit = of_process("VmData") + self._memory
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))

    def _expect_a_step(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, file=self._stacks, exit=True)

    def _report(self, status: str, **more: object) -> None:
        steps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        # `steps[0]` is the time of the second step, since nothing tells when the first one began.
        measured = {"status": status, "steps": steps[self._first - 2 :], "done": len(self._times), **more}
        self._path.write_text(json.dumps({**self.seen, **measured}, default=str), encoding="utf-8")


def _of_library(name: str) -> bool:
    """Returns whether a module belongs to a library, and not to the user's own code."""
    place = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""
    return "site-packages" in place or is_our_module(name)
