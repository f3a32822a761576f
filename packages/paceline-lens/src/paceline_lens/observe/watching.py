"""Joins `Telemetry` (`observe/telemetry.py`) to the run that it records, where the setting `watch_dir` names a folder.

A process has one file in that folder, so it records one run: the first that prepares an optimizer. A script may construct
another accelerator before that, or beside it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base import env
from paceline.base.files import expanded, is_there
from paceline.base.log import logger
from paceline.planner.estimate import Need, estimate
from paceline.run.run import Run
from paceline.run.states import States
from paceline.torch_internals.modules import is_compiled
from paceline.world.device import device_properties
from paceline.world.events import SavedCheckpoint
from paceline_lens.forecast.device import TABLE
from paceline_lens.forecast.known_forecasts import key_of, recall
from paceline_lens.observe.expert_load import ExpertLoad
from paceline_lens.observe.memory import resident
from paceline_lens.observe.phases import follow_phases
from paceline_lens.observe.step_flops import StepFlops
from paceline_lens.observe.telemetry import StepProgress, Telemetry
from paceline_lens.watch.journal import JournalWriter, RunHeader, add_header, rank_file
from paceline_lens.watch.records import AnomalyFound, CheckpointSaved, Hello, PlanMade

_MAIN_BYTES = 32 << 20
_OTHER_BYTES = 4 << 20  # there may be hundreds of these files


def join(run: Run, states: States, joined: Mapping[str, Any]) -> Telemetry | None:
    """Begins to record a run (`paceline.run.observers`); returns None if the setting `watch_dir` names no folder.

    Ranks: each by itself. A rank that cannot write to the folder logs a warning, and the run goes on.
    """
    folder = run.settings.watch_dir
    if folder is None or not run.runtime.keeps_files:
        return None
    if not _take_over(run):
        return None
    world = run.world
    try:
        path = expanded(folder)
        writer = JournalWriter(path / rank_file(world.rank), _MAIN_BYTES if world.is_main else _OTHER_BYTES)
        if world.is_main:
            add_header(path, _header(run))
    except OSError as error:
        # The ranks of a host have the same folder, so one of them says it.
        if world.local_rank == 0:
            logger("watch").warning("this run is not recorded: %s: %s.", error.filename or folder, error.strerror)
        return None
    phases = follow_phases(run)
    telemetry = Telemetry(writer, phases, _progress_of(weakref.ref(run)), memory_of(run.device), main=world.is_main)
    hello = _hello(run)
    telemetry.record(hello)
    _join(run, telemetry)
    if world.is_main:
        count_tokens_of_experts(run, telemetry)
    if world.is_main and hello.peak_flops is not None:
        count_flops(run, telemetry)
    # Only the launchers of Paceline bring the files of several hosts together.
    if world.node > 0 and world.local_rank == 0 and not env.get("PACELINE_RUN"):
        _check_shared(run, path)
    telemetry.start()
    return telemetry


def _join(run: Run, telemetry: Telemetry) -> None:
    """Subscribes to what happens in a run."""
    run.events.logged.subscribe(telemetry.log)
    run.events.clipped.subscribe(telemetry.clipped)
    if run.world.is_main:
        this_run = weakref.ref(run)

        def plan_made(models: Sequence[nn.Module]) -> None:
            prepared_run = this_run()
            if models and prepared_run is not None:
                telemetry.record(_plan(prepared_run))

        def saved(checkpoint: SavedCheckpoint) -> None:
            telemetry.record(CheckpointSaved(**vars(checkpoint)))

        run.events.prepared.subscribe(plan_made)
        run.events.anomaly.subscribe(lambda anomaly: telemetry.record(AnomalyFound(**vars(anomaly))))
        run.events.saved.subscribe(saved)
    # At the end of Python at the latest; a run that nobody holds any more ends before.
    finish = weakref.finalize(run, telemetry.finish)
    run.lifetime.subscribe(finish)
    _recorded.append((weakref.ref(run), finish))


def _check_shared(run: Run, folder: Path) -> None:
    """Warns, after `prepare`, if the host of rank 0 records into another folder than this host.

    Rank 0 has created its file before: the ranks have agreed on a plan since then.
    """

    def look(run: Run) -> None:
        if not is_there(folder / rank_file(0)):
            logger("watch").warning(
                "%s on %s is not the folder that the host of rank 0 has under this name, so the record there lacks the ranks "
                "of this host. Name a folder that all hosts share, or start the script with `paceline launch --watch`.",
                folder, socket.gethostname(),
            )  # fmt: skip

    _at_first_prepare(run, look)


def count_flops(run: Run, telemetry: Telemetry) -> None:
    """Counts the operations of the second step after `prepare`, and records the plan again with their number.

    A compiled model is left alone: what it computes cannot be seen, and to look at it may compile it anew.
    """
    this_run = weakref.ref(run)

    def tell(count: int) -> None:
        counted_run = this_run()
        if counted_run is not None and count:
            telemetry.record(replace(_plan(counted_run), flops=float(count)))

    def begin(run: Run) -> None:
        if not _has_compiled(run):
            follow_phases(run).listeners.append(StepFlops(tell))

    _at_first_prepare(run, begin)


def count_tokens_of_experts(run: Run, telemetry: Telemetry) -> None:
    """Records how evenly the tokens of this rank go to the experts, of models whose experts are stacked.

    A compiled model is left alone, as in `count_flops`.
    """
    load = ExpertLoad(telemetry.log)

    def begin(run: Run) -> None:
        if _has_compiled(run):
            return
        for entry in run.prepared.models:
            present = dict(entry.module.named_modules())  # a stage of a pipeline lacks some
            stacked = [row for row in entry.facts.experts if row.name in present and not (row.modules or row.problem)]
            for row in stacked:
                load.follow(present[row.name], row)
            if stacked and load not in follow_phases(run).listeners:
                follow_phases(run).listeners.append(load)

    _at_first_prepare(run, begin)


def _at_first_prepare(run: Run, begin: Callable[[Run], object]) -> None:
    """Calls a function once, when `prepare` has prepared models for the first time. It does not keep the run alive."""
    this_run = weakref.ref(run)

    def prepared(models: Sequence[nn.Module]) -> None:
        prepared_run = this_run()
        if models and prepared_run is not None:
            once()
            begin(prepared_run)

    once = run.events.prepared.subscribe(prepared)


def _has_compiled(run: Run) -> bool:
    return run.plan.compile or any(is_compiled(entry.wrapped) for entry in run.prepared.models)


# The file belongs to the process and not to a run.
_recorded: list[tuple[weakref.ref[Run], Callable[[], object]]] = []


def _take_over(run: Run) -> bool:
    """Ends the recording of an earlier run that has prepared no optimizer. Returns False if it has, and so goes on."""
    while _recorded:
        reference, finish = _recorded[-1]
        other = reference()
        if other is not None and other.prepared.optimizers and getattr(finish, "alive", False):
            return False
        finish()
        _recorded.pop()
    return True


# -- what is known of a run ----------------------------------------------------------------------------------------


def _header(run: Run) -> RunHeader:
    """Returns the header of the journal, which a launcher of ours would have written."""
    script = sys.argv[0] if sys.argv else ""
    name = Path(script).stem or "run"
    local_size = max(run.world.local_size, 1)
    nodes = -(-run.world.size // local_size)
    return RunHeader(
        name=name, command=[sys.executable, *sys.argv], script=script, host=socket.gethostname(), pid=os.getpid(),
        started=time.time(), procs=run.world.size, nodes=nodes,
    )  # fmt: skip


def _hello(run: Run) -> Hello:
    world, device = run.world, run.device
    model = model_of(device)
    return Hello(
        rank=world.rank, node=world.node, host=socket.gethostname(), local_rank=world.local_rank, pid=os.getpid(),
        device=f"{device} {model}".strip(), restart=env.get("TORCHELASTIC_RESTART_COUNT"),
        peak_flops=peak_flops_of(model, run.plan.precision), memory_bytes=_memory_in_all(device),
        base_bytes=resident()[0] if device.type == "cpu" else None,
    )  # fmt: skip


def model_of(device: torch.device) -> str:
    """Returns the name of an accelerator's model; "" if it is not known."""
    return str(getattr(device_properties(device), "name", ""))


def peak_flops_of(model: str, precision: str) -> float | None:
    """Returns the peak operations per second of a device, by its maker's datasheet; None if it is not in our table."""
    words = model.lower().replace("-", " ").split()
    for row in TABLE.values():
        if row.name.partition("-")[0] in words:
            return row.single if precision == "no" else row.half
    return None


def _memory_in_all(device: torch.device) -> int | None:
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return getattr(device_properties(device), "total_memory", None)


def _plan(run: Run) -> PlanMade:
    """Returns the plan with the forecast of `paceline plan` for this script, or else with an estimate of its memory."""
    plan = run.plan
    words = sys.argv or [""]
    forecast = recall(key_of(words[0], words[1:], run.world.size, plan))
    reasons = []
    for decision in plan.decisions:
        origin = f"{decision.source} ({decision.where})" if decision.where else decision.source
        reasons.append([decision.field, str(decision.value), origin, decision.reason])
    memory = estimate(plan, Need.of(run.situation())).held
    if forecast is None:
        return PlanMade(plan.explain(), reasons, memory_bytes=memory)
    if forecast.peak_bytes:
        memory = forecast.peak_bytes
    return PlanMade(plan.explain(), reasons, forecast.step_ms, memory, forecast.flops, bool(forecast.peak_bytes))


def _progress_of(reference: weakref.ref[Run]) -> Callable[[], StepProgress]:
    """Returns a function that any thread may call to learn the progress of a run."""
    last = StepProgress()

    def progress() -> StepProgress:
        nonlocal last
        run = reference()
        if run is not None:
            last = progress_of(run)
        return last

    return progress


def progress_of(run: Run) -> StepProgress:
    """Returns the progress of a run, which each tick of its journal contains."""
    step = max((optimizer.steps for optimizer in run.prepared.optimizers), default=0)
    lengths = [getattr(entry.scheduler, "total_steps", None) for entry in run.prepared.schedulers]
    totals = [length for length in lengths if isinstance(length, int)]
    progress = StepProgress(step, max(totals, default=None), _samples(run), run.gradients.items or None)
    if run.scaler is None:
        return progress
    return replace(progress, loss_scale=run.scaler.growth.scale, skipped_steps=run.scaler.skipped_steps)


def _samples(run: Run) -> int | None:
    """Returns the samples that all ranks have got from loaders that train, in all epochs; None if it is not known."""
    samples: int | None = None
    for loader in run.prepared.loaders:
        if not loader.trains:
            continue
        position = loader.position
        before = 0
        if position.epoch:
            try:
                before = position.epoch * loader.total_dataset_length
            except TypeError:
                return None  # nobody knows how long an epoch of a stream is
        samples = (samples or 0) + before + position.samples
    return samples


def memory_of(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Returns a function that reads the bytes in use now and the peak so far; on the CPU, those of the process."""
    if device.type == "cpu":
        return resident

    def allocated() -> tuple[int, int]:
        return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)

    return allocated
