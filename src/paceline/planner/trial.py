"""What a script is made to do in a trial: its own steps are timed, nothing of it is kept, and it ends after the last.

    Notes     what is seen at the seams of the house: batches, windows, a DeepSpeed config; in a rehearsal too
    Trial     the same in a real run, as one of its processes: step 1 .. first-1 warm up | first .. last are timed | the end

A trial is a forked process that is thrown away, so what is replaced here stays replaced.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.launch.launcher import Target
from paceline.launch.worker import become, leave
from paceline.optim.batch_size import is_out_of_memory
from paceline.planner.rehearsal import without_files, wrap_at
from paceline.planner.script_config import script_configs
from paceline.world.tree import first_rows

Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Notes:
    """What is seen of a script.

    Args:
        change: what becomes of a DeepSpeed config before it is used.

    Attributes:
        seen: "config" (the engine's config as the script gave it), "rows" (samples of one micro-batch on
            this rank), "batch" (samples of one step over all ranks), "windows" (whether the loop says where a step's
            micro-batches are), "modules" (what the script imported from libraries).
    """

    def __init__(self, change: Change) -> None:
        self.change = change
        self.seen: dict[str, Any] = {"windows": False, "rows": None, "batch": None}
        self._before = set(sys.modules)
        self._engine = False

    def set(self, compat: str) -> None:
        """Replaces what is looked at."""
        wrap_at("paceline.optim.optimizer.PreparedOptimizer.step", self._stepping)
        wrap_at("paceline.optim.accumulate.Accumulation.window", self._window)
        if "deepspeed" in compat:
            self._engine = True
            importlib.import_module("paceline.compat.deepspeed.initialize")
            self._configs()
            wrap_at("paceline.compat.deepspeed.engine.DeepSpeedEngine.forward", self._feeding)
            wrap_at("paceline.compat.deepspeed.pipe_engine.PipelineEngine._compare_rows", self._pulling)

    def write(self, path: Path) -> None:
        """Writes what was seen."""
        self.seen["modules"] = sorted(name for name in set(sys.modules) - self._before if _of_library(name))
        path.write_text(json.dumps(self.seen, default=str), encoding="utf-8")

    def stepped(self, optimizer: Any) -> None:
        """Called after each optimizer step."""

    def _stepping(self, step: Any) -> Any:
        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = optimizer.steps
            result = step(optimizer, *args, **kwargs)
            if optimizer.steps > before:
                self._count(optimizer)
                self.stepped(optimizer)
            return result

        return stepping

    def _count(self, optimizer: Any) -> None:
        """Notes the batch of a step, from the loader that is being iterated."""
        gradients = optimizer._accumulation
        loader = gradients._active.top
        info = loader.current if loader is not None else None
        if info is not None and not self._engine:
            windows = gradients.steps if self.seen["windows"] else 1
            # The last batch of an epoch may be smaller than those before it.
            self.seen["rows"] = max(self.seen["rows"] or 0, info.real[info.index])
            self.seen["batch"] = max(self.seen["batch"] or 0, sum(info.real) * windows)

    def _window(self, window: Any) -> Any:
        def noted(gradients: Any, hold: Any) -> Any:
            self.seen["windows"] = True
            return window(gradients, hold)

        return noted

    def _feeding(self, forward: Any) -> Any:
        def fed(engine: Any, *inputs: Any, **named: Any) -> Any:
            self._fed(engine, (inputs, named))
            return forward(engine, *inputs, **named)

        return fed

    def _pulling(self, compare: Any) -> Any:
        def compared(engine: Any, inputs: Any, named: Any) -> Any:
            self._fed(engine, (inputs, named))
            return compare(engine, inputs, named)

        return compared

    def _fed(self, engine: Any, batch: Any) -> None:
        """Notes the first micro-batch of an engine."""
        if self.seen["rows"] is None:
            self.seen["rows"] = first_rows(batch)
            self.seen["batch"] = engine.batch.train

    def _configs(self) -> None:
        """Every place of ours that reads a DeepSpeed config reads a changed one."""
        reading = importlib.import_module("paceline.compat.deepspeed.config")
        read = reading.read

        def changed(config: Any, *args: Any, **kwargs: Any) -> Any:
            content = script_configs().contents(config)
            self.seen["config"] = content
            return read(self.change(content), *args, **kwargs)

        for name, module in list(sys.modules.items()):
            if name.startswith("paceline.compat.") and getattr(module, "read", None) is read:
                module.read = changed  # type: ignore[attr-defined]


class Trial(Notes):
    """One process of a trial.

    Args:
        folder: where this rank leaves what it found, as `rank<n>.json`.
        first, last: optimizer steps that are timed.
        limit_s: seconds that may pass without a step.
        memory: bytes that this process may take on the host, on top of what it has; 0 for no bound.
        change: as in `Notes`.
    """

    def __init__(self, folder: Path, first: int, last: int, limit_s: float, memory: int, change: Change) -> None:
        super().__init__(change)
        self.folder, self.first, self.last, self.limit_s, self.memory = folder, first, last, limit_s, memory
        self._times: list[float] = []
        self._optimizer: Any = None
        self._resident = 0

    def run(self, target: Target, compat: str) -> None:
        """Runs the script, to the last step that is timed. It does not return from there: the process ends."""
        self.path = self.folder / f"rank{environment.get('RANK')}.json"
        without_files(compat)
        self.set(compat)
        self._bound()
        with self.path.with_suffix(".stack").open("w") as file:
            self._stack = file
            self._patience()
            try:
                become(target.on(environment.get("LOCAL_RANK") or 0), compat)
            except Exception as error:
                if is_out_of_memory(error):
                    self._leave_word("does not fit", why=str(error).strip().splitlines()[0] or type(error).__name__)
                raise
            self._leave_word("ended", why=f"the script ended after {len(self._times)} steps")

    def stepped(self, optimizer: Any) -> None:
        """Notes the time; ends the process after the last step."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:  # of several, the first one counts
            return
        device = _device()
        if device is not None:
            torch.accelerator.synchronize()
        self._times.append(time.perf_counter())
        self._patience()
        if len(self._times) < self.last:
            return
        peak = torch.accelerator.max_memory_allocated() if device is not None else _status("VmHWM") - self._resident
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another needs its store or its connections
        self._leave_word("measured", bytes=peak)
        leave(0)  # not by an exception: `finally` of a script saves, and `except` of a script goes on

    def _bound(self) -> None:
        """Lets this process fail, and not the host, where it takes more than its share."""
        self._resident = _status("VmRSS")
        if self.memory:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            bound = _status("VmData") + self.memory
            resource.setrlimit(
                resource.RLIMIT_DATA, (bound if most == resource.RLIM_INFINITY else min(bound, most), most)
            )

    def _patience(self) -> None:
        faulthandler.dump_traceback_later(self.limit_s, file=self._stack, exit=True)

    def _leave_word(self, status: str, **more: Any) -> None:
        steps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        found = {"status": status, "steps": steps[self.first - 2 :], "done": len(self._times), **more}
        self.path.write_text(json.dumps({**self.seen, **found}, default=str), encoding="utf-8")


def _device() -> torch.device | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None and found.type != "cpu" else None


def _status(name: str) -> int:
    """A number of bytes that the system tells of this process; 0 where it does not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _of_library(name: str) -> bool:
    """Whether a module is no part of what the user writes."""
    place = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""
    return "site-packages" in place or name.startswith("paceline.")


@contextmanager
def noting(path: Path, change: Change, compat: str) -> Iterator[None]:
    """While it is open a script is looked at, as in a rehearsal; what was seen is written at the end."""
    notes = Notes(change)
    notes.set(compat)
    try:
        yield
    finally:
        notes.write(path)
