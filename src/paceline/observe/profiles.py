"""`Profiles`: what a run measures of itself, as the setting `profile` says.

phases      which part of the step runs (observe.phases); the others listen to it
wall_clock  how long each part takes           flops   what a step computes, and where
comms       what ranks send each other         memory  the most that each part holds

Each of the four is None where it is off; where all are, there are no `Profiles` at all.
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
from paceline.observe.clock import clock_of
from paceline.observe.comms import Comms
from paceline.observe.flops import Flops
from paceline.observe.memory import Memory
from paceline.observe.phases import Phases
from paceline.observe.wall_clock import WallClock
from paceline.plan.options import option, read
from paceline.world.collectives import Collectives

NAME = "profile"  # of the setting, and of its options: `--option profile.flops_step=3`


@dataclass(frozen=True)
class ProfileOptions:
    """How each profile is taken."""

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


def chosen(
    profile: str | Sequence[str] | Mapping[str, Any] | None, options: Mapping[str, Mapping[str, Any]] | None
) -> tuple[str | None, Mapping[str, Mapping[str, Any]] | None]:
    """The setting and the options in what `Accelerator(profile=...)` was given.

    Args:
        profile: names as text or list; or names with a mapping of options each.
        options: of strategies, to which those of profiles are added.
    """
    if profile is None or isinstance(profile, str):
        return profile, options
    names = ",".join(map(str, profile)) or "no"
    if not isinstance(profile, Mapping):
        return names, options
    options_of_profiles: dict[str, Any] = {}
    for name, chosen_options in profile.items():
        if isinstance(chosen_options, Mapping):
            prefix = str(name).replace("-", "_")
            options_of_profiles |= {f"{prefix}_{key}": value for key, value in chosen_options.items()}
    if not options_of_profiles:
        return names, options
    options = options or {}
    return names, {**options, NAME: {**options.get(NAME, {}), **options_of_profiles}}


class Profiles:
    """The profiles of one run.

    Args:
        names: those that are on.
        options: as `ProfileOptions` has them.
        device: of this rank.
        main: whether this process tells.
        collectives: of all ranks.
        width: gives how many ranks read different samples.
        predicted: bytes that the plan predicts for this rank.
        folder: where `profile.jsonl` is written at the end; None tells the tables instead.
        places: where each option was said.
        phases: of the run; None makes some.

    Attributes:
        phases: what runs now.
        wall_clock, flops, comms, memory: None where off.
        is_main, collectives: as given.
        tell: is given lines of text, on the main process alone; another function may be put in its place.

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
        # The wall clock comes first, so that what the others do falls into the phase that begins.
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
        (total,) = self.collectives.sum_ints([own])
        return total // self._width(), total

    def follow(self, module: nn.Module, parameters: int) -> None:
        """Takes a prepared model in.

        Args:
            module: as the user wrote it.
            parameters: elements of the whole model.
        """
        if self.flops is not None:
            self.flops.follow_model(module, parameters)

    # -- what it says --------------------------------------------------------------------------------------------

    def summary(self, straggler: bool = False) -> dict[str, Any]:
        """Everything that was measured on this rank, by profile, as plain values.

        Ranks: with `straggler`, which compares the collectives of the ranks, all; else any.
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
        """The few numbers for trackers: milliseconds of the last step by phase, peak of memory."""
        values: dict[str, float] = {}
        last = self.wall_clock.last if self.wall_clock is not None else None
        if last is not None:
            values = {f"profile/{name}_ms": ms for name, ms in last.phases.items()}
            values["profile/step_total_ms"] = last.total_ms
        if self.memory is not None:
            values["profile/peak_bytes"] = float(self.memory.peak)
        return values

    def text(self, straggler: bool = False) -> str:
        """All tables. Ranks: as `summary`."""
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
        """Ends measuring; the main process writes `profile.jsonl`, or tells the tables where there is no folder."""
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
            measured = (self.wall_clock, self.comms, self.memory)  # a profile of flops was told when it was complete
            self.tell("\n\n".join(profile.text() for profile in measured if profile is not None))
            return
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        with open(Path(self._folder) / "profile.jsonl", "a", encoding="utf-8") as lines:
            for name, measured in self.summary().items():
                lines.write(json.dumps({"profile": name, **measured}) + "\n")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, with a list of operations as text."""
    ops = options.get("comms_ops", "")
    return {**options, "comms_ops": ops if isinstance(ops, str) else ",".join(map(str, ops))}


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
