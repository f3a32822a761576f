"""Runs scripts in real processes. Those of one width share a process group for as long as none of them fails.

    run_jobs     parent: starts a group of ranks with the jobs that are left, until none is
    _work        rank: one script after the other; each result goes into a file of this rank
    _Board       shared memory: how far each rank is, so that all leave together after a failure
    _Watch       a thread of each rank, which ends it where nothing moves any more

A script that failed ends its group: a rank may have left a collective that others wait in.
"""

from __future__ import annotations

import faulthandler
import importlib
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loops.compare import NUMBERS
from loops.plain import plain, states_of
from loops.programs import Program

from paceline.base.errors import PacelineError
from paceline.base.temporary import temporary_folder
from paceline.testing import RankFailed, run_ranks

Results = list[dict[str, Any] | None]

_LIMIT_S = 60.0  # one script takes 1 to 3 s on 4 processes of a very busy machine
_GRACE_S = 1.5  # how long the others may take after one rank has failed
_MOST_JOBS = 80  # for one group; each script leaves process groups behind
_ENDED = 77
_LOOK_S = 0.5
_LOOKS = 16  # so many looks one after the other that find every rank asleep are a hang


@dataclass(frozen=True)
class Job:
    """One script; or a program, which then runs in plain PyTorch.

    Attributes:
        reference: runs the program.
        states: whether optimizer states can be compared by the places of their parameters.
    """

    text: str = ""
    program: Program | None = None
    reference: Callable[[Program], dict[str, Any]] = plain
    states: bool = True


class _Board:
    """For each rank the number of jobs that it has finished, and whether the last one failed; and who it is, for `_Watch`."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.memory = mmap.mmap(-1, 32 * world)

    def write(self, rank: int, finished: int, failed: bool) -> None:
        struct.pack_into("qq", self.memory, 32 * rank, finished, failed)

    def read(self) -> list[tuple[int, bool]]:
        return [struct.unpack_from("qq", self.memory, 32 * rank) for rank in range(self.world)]

    def enter(self, rank: int, process: int, watch: int) -> None:
        struct.pack_into("qq", self.memory, 32 * rank + 16, process, watch)

    def all_are_asleep(self) -> bool:
        """Whether no thread of any rank computes, wants to, or waits for a disk; those of the watches do not count.

        A rank of a busy machine that gets no processor is not asleep.
        """
        for rank in range(self.world):
            process, watch = struct.unpack_from("qq", self.memory, 32 * rank + 16)
            for state in Path(f"/proc/{process}/task").glob("*/stat"):
                if state.parent.name != str(watch) and state.read_text().rpartition(")")[2].split()[0] in "RD":
                    return False
        return True


class _Watch(threading.Thread):
    """Ends this rank where a job takes too long, or where all ranks wait."""

    def __init__(self, board: _Board, rank: int, limit_s: float) -> None:
        super().__init__(daemon=True)
        self.board, self.rank, self.limit_s = board, rank, limit_s
        self.begun = time.monotonic()
        self.looks = 0

    def begin_job(self) -> None:
        self.begun = time.monotonic()
        self.looks = 0

    def run(self) -> None:
        self.board.enter(self.rank, os.getpid(), threading.get_native_id())
        while time.monotonic() - self.begun < self.limit_s and self.looks < _LOOKS:
            time.sleep(_LOOK_S)
            try:
                is_asleep = self.board.all_are_asleep()
            except OSError:
                is_asleep = True  # a thread or a process has ended meanwhile
            self.looks = self.looks + 1 if is_asleep else 0
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(2 * _LOOK_S)  # so that the others write their stacks, too
        os._exit(_ENDED)


def run_jobs(jobs: Sequence[Job], world: int, limit_s: float = _LIMIT_S) -> list[Results]:
    """The results of each job, by rank; None for a rank that did not end."""
    results: list[Results] = []
    while len(results) < len(jobs):
        batch = jobs[len(results) : len(results) + _MOST_JOBS]
        _load_before_forking(batch)
        with tempfile.TemporaryDirectory(prefix="loops-", dir=temporary_folder()) as folder:
            board = _Board(world)
            try:
                arguments = (batch, folder, board, limit_s)
                run_ranks(_work, world, args=arguments, timeout_s=(limit_s + 5) * len(batch) + 60, output=[])
            except RankFailed:
                pass  # what the ranks have written says which script it was
            results += _collected(Path(folder), world, len(batch))
    return results


def _load_before_forking(jobs: Sequence[Job]) -> None:
    """Loads torchao here, if a job needs it: each rank would take seconds for it."""
    modules: set[str] = set()
    for job in jobs:
        program = job.program
        if "adamw8bit" in job.text or (program and any(each.kind == "adamw8bit" for each in program.optimizers)):
            modules.add("torchao.optim")
        if "fp8" in job.text or (program and program.recipe):
            modules |= {"torchao.float8", "torchao.prototype.moe_training.mxfp8_linear"}
    for name in sorted(modules):
        importlib.import_module(name)


def _collected(folder: Path, world: int, count: int) -> list[Results]:
    """What the ranks have written: at least one job, and up to the first that failed."""
    written: list[list[dict[str, Any]]] = [_loaded(folder / f"{rank}.results") for rank in range(world)]
    done = max(1, *map(len, written)) if world else 0
    return [[own[place] if place < len(own) else None for own in written] for place in range(min(done, count))]


def _loaded(path: Path) -> list[dict[str, Any]]:
    loaded = []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    loaded.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return loaded


def _work(jobs: Sequence[Job], folder: str, board: _Board, limit_s: float) -> None:
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")
    with (Path(folder) / f"{rank}.results").open("wb") as file:
        watch = _Watch(board, rank, limit_s)
        watch.start()
        for number, job in enumerate(jobs, 1):
            watch.begin_job()
            result = run_plain(job.program, job.reference) if job.program is not None else run_script(job)
            pickle.dump(result, file)
            file.flush()
            # A refusal before the loop came before the first collective, and one process waits for nobody.
            harmless = board.world == 1 or (result.get("early") and result["code"] is not None)
            board.write(rank, number, "error" in result and not harmless)
            if _wait_for_all(board, number, limit_s):
                # Not a return: leaving a group takes part in collectives, which others may not.
                os._exit(_ENDED)


def _wait_for_all(board: _Board, number: int, limit_s: float) -> bool:
    """Waits until all ranks have finished this job, or for some time after one has failed. Gives whether any has failed."""
    begin = time.monotonic()
    while True:
        ranks = board.read()
        failed = any(finished >= number and wrong for finished, wrong in ranks)
        if all(finished >= number for finished, _ in ranks):
            return failed
        if time.monotonic() - begin > (_GRACE_S if failed else limit_s):
            return True
        time.sleep(0.0005)


def run_plain(program: Program, reference: Callable[[Program], dict[str, Any]]) -> dict[str, Any]:
    """The reference; or the error of a program that is wrong in plain PyTorch, too."""
    try:
        return reference(program)
    except Exception as error:
        return _error(error)


def _error(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, PacelineError) else None
    trace = "".join(traceback.format_exception(error)[-4:])
    if error.__cause__ is not None:
        trace += f"\ncaused by {error.__cause__!r}"
    return {"error": type(error).__name__, "code": code, "text": str(error), "trace": trace, "at": time.monotonic()}


def run_script(job: Job) -> dict[str, Any]:
    """Runs one script in this rank; what it noted, or its error."""
    # torch's compiler imports the module of a function by its name.
    module = sys.modules["program"] = types.ModuleType("program")
    names = vars(module)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    try:
        exec(compile(job.text, "<program>", "exec"), names)
        result = _numbers(names, job)
    except BaseException as error:
        result = {**_error(error), "early": "train" not in names}
    finally:
        torch.set_default_dtype(dtype)
        torch.compiler.set_stance("default")
        accelerators = [names.pop(name) for name in ("accelerator2", "accelerator") if name in names]
    if "error" not in result or result["early"]:
        for accelerator in accelerators:
            accelerator.free_memory()
    names.clear()
    del sys.modules["program"]
    sys.stdout.flush()
    return result


def _numbers(names: dict[str, Any], job: Job) -> dict[str, Any]:
    result = {name: [float(value) for value in names[name]] for name in NUMBERS}
    if "weights" in names:  # a door whose scripts have no accelerator
        return {**result, "weights": names["weights"], "rates": names["rates"]}
    accelerator = names["accelerator"]
    others = names.get("accelerator2", accelerator)  # of `Program.apart`
    models = [names[name] for name in _numbered(names, "model")]
    averages = [names[name] for name in _numbered(names, "average")]
    optimizers = [names[name] for name in _numbered(names, "optimizer")]
    weights = [(others if number else accelerator).get_state_dict(model) for number, model in enumerate(models)]
    result["weights"] = [_copied(each) for each in weights]
    if "scale" in names:  # of `Program.loose`
        result["weights"].append({"scale": names["scale"].detach().clone()})
    result["weights"] += [_copied(accelerator.get_state_dict(average)) for average in averages]
    if job.states:
        result["states"] = _whole_states(accelerator, optimizers)
        result["rates"] = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    return result


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _numbered(names: dict[str, Any], kind: str) -> list[str]:
    return sorted(name for name in names if name.startswith(kind) and name[len(kind) :].isdigit())


def _whole_states(accelerator: Any, optimizers: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """The states of all optimizers; at the lower ZeRO stages, the rows or the parameters of all ranks together."""
    shapes = [[p.shape for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    ranks = accelerator.run.collectives.gather_object([states_of(optimizer, _whole) for optimizer in optimizers])
    own: list[list[dict[str, Any]]] = ranks[accelerator.process_index]
    for number, states in enumerate(own):
        for place, state in enumerate(states):
            everywhere = [rank[number][place] for rank in ranks]
            for name in dict.fromkeys(name for each in everywhere for name in each):
                values = [each[name] for each in everywhere if name in each]
                state[name] = _joined(state.get(name, values[0]), values, shapes[number][place])
    return own


def _joined(own: Any, values: Sequence[Any], shape: torch.Size) -> Any:
    """This rank's value; if it has some rows of what another shape has, the rows of all ranks."""
    if not isinstance(own, torch.Tensor) or own.shape == shape or own.ndim != len(shape):
        return own
    return torch.cat(list(values))


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = getattr(value, "full_tensor", None)
    return whole() if whole is not None else value
