"""`Profiles` holds the profiles of a run that the setting `profile` has switched on. `run/profiling.py` makes it in `prepare`.

phases      which part of the step runs (observe.phases); the profiles listen to it
wall_clock  how long each part takes
flops       how much a step computes, by module
comms       what ranks send each other
memory      the peak memory of each part

Each of the four profiles is None if it is off. If all are off, there is no `Profiles` object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base.errors import ConfigError
from paceline.config.kinds import YES_NO, matching, whole
from paceline.plan.options import option, read
from paceline.world.collectives import Collectives
from paceline_lens.observe.clock import clock_of
from paceline_lens.observe.comms import Comms
from paceline_lens.observe.flops import Flops
from paceline_lens.observe.memory import Memory
from paceline_lens.observe.phases import Phases
from paceline_lens.observe.wall_clock import WallClock

NAME = "profile"  # the name of the setting, and the first word of its options: `--option profile.flops_step=3`


@dataclass(frozen=True)
class ProfileOptions:
    """The options of all profiles."""

    wall_clock_every: int = option(1, whole(0), "Steps between two lines of the wall clock; 0 tells none.")
    flops_step: int = option(2, whole(1), "The step that is counted, from 1; the one after it is timed.")
    flops_depth: int = option(-1, whole(-1), "How deep the text goes into the modules; -1: all the way.")
    flops_top: int = option(1, whole(1), "Modules listed at each depth.")
    flops_detailed: bool = option(True, YES_NO, "The text holds the tree of modules.")
    flops_file: str | None = option(None, matching(r".+", "a file", "FILE"), "Where the text goes instead of stderr.")
    comms_ops: str = option(
        "", matching(r".*", "operations", "OP,..."), "Those that are recorded, by commas; none: all."
    )
    comms_verbose: bool = option(False, YES_NO, "Tells each call.")


class Profiles:
    """The profiles of one run.

    Args:
        names: the profiles that are on.
        options: the fields of `ProfileOptions`.
        device: the device of this rank.
        main: whether this is the main process, which alone prints and writes.
        collectives: the collectives of all ranks.
        width: returns how many ranks read different samples.
        predicted: returns the bytes that the plan predicts for this rank.
        folder: where `profile.jsonl` is written at the end; None prints the tables instead.
        places: where each option was given.
        phases: the phases of the run; None makes new ones.

    Attributes:
        phases: which part of the step runs.
        wall_clock, flops, comms, memory: the profiles; None if off.
        is_main, collectives: as given.
        tell: called with lines of text, on the main process alone; another function may replace it.

    Raises:
        ConfigError: `profile-options`.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Any],
        device: torch.device,
        main: bool,
        collectives: Collectives,
        width: Callable[[], int] = lambda: 1,
        predicted: Callable[[], Mapping[str, int]] = dict,
        folder: str | None = None,
        places: Mapping[str, str] | None = None,
        phases: Phases | None = None,
    ) -> None:
        chosen, problems = read(ProfileOptions, _plain(options), NAME, places)
        if problems:
            raise ConfigError(
                "profile-options",
                "the profiles of this run have options that they do not take.",
                why=[f"{problem.what} {problem.why}" for problem in problems],
                fix=problems[0].fix,
            )
        self.phases = Phases() if phases is None else phases
        self.tell: Callable[[str], None] = _to_stderr
        self.is_main = main
        self.collectives = collectives
        self._folder = folder
        self._width = width
        self._finished = False
        clock = clock_of(device)
        self.wall_clock: WallClock | None = None
        self.flops: Flops | None = None
        self.memory: Memory | None = None
        self.comms: Comms | None = None
        # The wall clock is the first listener, so that the time that the other profiles take at the change of a phase
        # counts for the phase that begins.
        if "wall-clock" in names:
            self.wall_clock = WallClock(clock, chosen.wall_clock_every, self._say)
            self.phases.listeners.append(self.wall_clock)
        if "flops" in names:
            self.flops = Flops(
                chosen.flops_step, chosen.flops_depth, chosen.flops_top, chosen.flops_detailed,
                chosen.flops_file if main else None, clock, self._totals, self._say,
            )  # fmt: skip
            self.phases.listeners.append(self.flops)
        if "memory" in names:
            self.memory = Memory(device, predicted)
            self.phases.listeners.append(self.memory)
        if "comms" in names:
            operations = [name.strip() for name in chosen.comms_ops.split(",") if name.strip()]
            self.comms = Comms(device, operations, chosen.comms_verbose, self._say, lambda: self.phases.now)
            self.comms.start()

    def _say(self, text: str) -> None:
        if self.is_main:
            self.tell(text)

    def _totals(self, own: int) -> tuple[int, int]:
        """Returns the sums of a number over the ranks of one copy of the model, and over all ranks. Ranks: all."""
        (total,) = self.collectives.sum_ints([own])
        return total // self._width(), total

    def follow(self, module: nn.Module, parameters: int) -> None:
        """Adds a prepared model.

        Args:
            module: the module as the user wrote it.
            parameters: the number of elements of the unsharded model.
        """
        if self.flops is not None:
            self.flops.follow_model(module, parameters)

    # -- results -------------------------------------------------------------------------------------------------

    def summary(self, straggler: bool = False) -> dict[str, Any]:
        """Returns everything that was measured on this rank, by profile, as plain values.

        Ranks: all if `straggler` is true, which compares the collectives of the ranks; otherwise any.
        """
        summary: dict[str, Any] = {}
        if self.wall_clock is not None:
            summary["wall-clock"] = {**self.wall_clock.mean(), "steps": self.wall_clock.steps}
        if self.flops is not None and self.flops.profile is not None:
            summary["flops"] = self.flops.profile.to_dict()
        if self.comms is not None:
            summary["comms"] = self.comms.to_dict(straggler, self.collectives)
        if self.memory is not None:
            summary["memory"] = self.memory.to_dict()
        return summary

    def values(self) -> dict[str, float]:
        """Returns a few numbers for trackers: milliseconds of the last step by phase, and the peak memory."""
        values: dict[str, float] = {}
        if self.wall_clock is not None and self.wall_clock.last is not None:
            last = self.wall_clock.last
            values = {f"profile/{name}_ms": ms for name, ms in last.phases.items()}
            values["profile/step_total_ms"] = last.total_ms
        if self.memory is not None:
            values["profile/peak_bytes"] = float(self.memory.peak)
        return values

    def text(self, straggler: bool = False) -> str:
        """Returns the tables of all profiles. Ranks: as `summary`."""
        tables: list[str] = []
        if self.wall_clock is not None:
            tables.append(self.wall_clock.text())
        if self.flops is not None:
            tables.append(self.flops.text())
        if self.comms is not None:
            tables.append(self.comms.text(straggler, self.collectives))
        if self.memory is not None:
            tables.append(self.memory.text())
        return "\n\n".join(filter(None, tables))

    def finish(self) -> None:
        """Stops measuring. The main process then writes `profile.jsonl`, or prints the tables if there is no folder."""
        if self._finished:
            return
        self._finished = True
        if self.wall_clock is not None:
            self.wall_clock.finish()
        self.phases.end()
        if self.flops is not None:
            self.flops.finish()
        if self.comms is not None:
            self.comms.stop()
        if not self.is_main:
            return
        if self._folder is None:
            # The table of `flops` is left out: it was printed when its step was complete.
            profiles = (self.wall_clock, self.comms, self.memory)
            tables = [profile.text() for profile in profiles if profile is not None]
            self.tell("\n\n".join(tables))
            return
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        with open(Path(self._folder) / "profile.jsonl", "a", encoding="utf-8") as lines:
            for name, measured in self.summary().items():
                lines.write(json.dumps({"profile": name, **measured}) + "\n")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, with a list of operations as text."""
    operations = options.get("comms_ops", "")
    if not isinstance(operations, str):
        operations = ",".join(map(str, operations))
    return {**options, "comms_ops": operations}


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
