"""`SystemValues`: what `Accelerator.log` adds to the values of the script where the setting `log_system` asks for it.

    system/steps_per_second, samples_per_second, tokens_per_second      of all ranks together, since the last call of `log`
    system/mfu                                                          operations a second, as a part of the devices' peak
    system/memory_peak_bytes, memory_peak_bytes_of_all                  of the main process, and the most of any rank
    system/share_data, share_forward, ...                               of the step's time, where `profile=wall-clock` is on

Nothing waits for another rank. Each of the others leaves its memory's peak in the group's store, every ten seconds at most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from paceline.base.log import warn_once
from paceline.run.run import Run
from paceline.run.states import States
from paceline.world import rendezvous
from paceline_lens.observe.flops import Flops
from paceline_lens.observe.phases import follow_phases
from paceline_lens.observe.profiles import Profiles
from paceline_lens.observe.profiling import follow_models
from paceline_lens.observe.telemetry import StepProgress
from paceline_lens.observe.watching import memory_of, model_of, peak_flops_of, progress_of

_PERIOD_S = 10.0
_COUNTED_STEP = 2  # the first one builds and connects


def join(run: Run, states: States, joined: Mapping[str, Any]) -> SystemValues | None:
    """See `paceline.run.observers`. A rehearsal writes nothing, and measures nothing."""
    return SystemValues(run, joined.get("profile")) if run.runtime.keeps_files else None


class SystemValues:
    """Throughput, utilisation and memory of one run.

    Args:
        run: what is measured.
        profiles: of the run; those that are on are read and not taken twice.

    Ranks: all make one; the main process alone reads it. Once, at the end of step 2, all add up what they have computed.
    """

    def __init__(self, run: Run, profiles: Profiles | None) -> None:
        self._run = run
        self._profiles = profiles
        self._memory = memory_of(run.device)
        self._peak_flops = peak_flops_of(model_of(run.device), run.plan.precision)
        self._store = rendezvous.part("system-values") if run.world.size > 1 else None
        self._begin: tuple[float, StepProgress] | None = None  # of what is measured next
        self._left_at = -_PERIOD_S  # when this rank left its peak in the store last, or the main process looked
        self._most_elsewhere: int | None = None
        self._flops = profiles.flops if profiles is not None else None
        if self._flops is None and self._peak_flops is not None:
            self._flops = Flops(_COUNTED_STEP, totals=self._totals)
            follow_phases(run).listeners.append(self._flops)
            follow_models(run, self._flops.follow_model)
        run.events.before_first_step.subscribe(self._restart)
        if self._store is not None and not run.world.is_main:
            run.events.before_step.subscribe(self._leave_peak)

    def _totals(self, own: int) -> tuple[int, int]:
        (total,) = self._run.collectives.sum_ints([own])
        return total // self._run.plan.layout.width, total

    def _restart(self) -> None:
        self._begin = time.perf_counter(), progress_of(self._run)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, float]:
        """The values since the last call that gave some; nothing where no step has ended since, or not on the main process."""
        if self._begin is None or not self._run.world.is_main:
            return {}
        begin, before = self._begin
        now = time.perf_counter()
        progress = progress_of(self._run)
        seconds = now - begin
        steps = progress.step - before.step
        if steps < 0:  # a checkpoint was loaded
            self._begin = now, progress
        if steps <= 0 or seconds <= 0:
            return {}
        self._begin = now, progress
        values = {"steps_per_second": steps / seconds}
        for name, count, count_before in (
            ("samples_per_second", progress.samples, before.samples),
            ("tokens_per_second", progress.tokens, before.tokens),
        ):
            if count is not None and count > (count_before or 0):
                values[name] = (count - (count_before or 0)) / seconds
        values |= self._utilisation(steps / seconds)
        values |= self._peaks()
        values |= self._shares()
        return {f"system/{name}": value for name, value in values.items()}

    def _utilisation(self, steps_per_second: float) -> dict[str, float]:
        if self._peak_flops is None:
            device = model_of(self._run.device) or str(self._run.device)
            warn_once("observe", f"system/mfu is left out of the log: the peak of this device ({device}) is not known.")
            return {}
        profile = None if self._flops is None else self._flops.profile
        if profile is None or not profile.forward:
            return {}
        # What is computed again in the backward pass (recomputation) is no work of the model.
        flops_of_step = profile.everywhere * (profile.forward + profile.backward) / profile.forward
        return {"mfu": flops_of_step * steps_per_second / (self._peak_flops * self._run.world.size)}

    def _peaks(self) -> dict[str, float]:
        own = self._memory()[1]
        if self._store is None:
            return {"memory_peak_bytes": float(own)}
        now = time.monotonic()
        if now - self._left_at >= _PERIOD_S or self._most_elsewhere is None:
            self._left_at = now
            keys = [str(rank) for rank in range(1, self._run.world.size)]
            if self._store.check(keys):
                self._most_elsewhere = max(int(peak) for peak in self._store.multi_get(keys))
        values = {"memory_peak_bytes": float(own)}
        if self._most_elsewhere is not None:
            values["memory_peak_bytes_of_all"] = float(max(own, self._most_elsewhere))
        return values

    def _leave_peak(self, optimizer: Optimizer) -> None:
        now = time.monotonic()
        if now - self._left_at >= _PERIOD_S:
            self._left_at = now
            assert self._store is not None
            self._store.set(str(self._run.world.rank), str(self._memory()[1]))

    def _shares(self) -> dict[str, float]:
        clock = self._profiles.wall_clock if self._profiles is not None else None
        mean = clock.mean() if clock is not None else {}
        total = mean.pop("total", 0.0)
        return {f"share_{name}": ms / total for name, ms in mean.items() if ms and total}
