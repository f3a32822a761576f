"""`Runtime`: what a run takes from its surroundings. A rehearsal and a tuning trial replace it by another one.

    Runtime             a real run: devices, a process group that answers, files that are written
    RehearsalRuntime    `paceline_lens.forecast`: ranks that do not exist, tensors without values, no files
    ScriptNotes, Trial  `paceline_lens.tune`: the run is looked at, writes no files, and ends after the last measured step
    Recorder            `paceline_lens.verify`: the same, and what it computes is recorded
    DrilledRank         `paceline_lens.rehearse`: a real run that is disturbed; only its trackers are silent

A script constructs its `Accelerator` itself, so a runtime cannot be passed to it as an argument: `use` sets that of the
process, which does nothing else afterwards. What happens in a run it learns as others do: by the run's `events`, to which it
subscribes in `begin`. Whatever a script calls before there is a run asks for `current`: `start_run`,
and functions under other libraries' names. Everything else takes the runtime from the `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paceline.world import device as devices
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.config import RunSettings


class Runtime:
    """The surroundings of a real run.

    Attributes:
        keeps_files: whether checkpoints and trackers write, and whether a run looks for a checkpoint to go on from.
        tracks: whether trackers write, where files are kept.
        others_answer: whether the other ranks exist, and so take part in collectives.
        compares_widths: whether runs of several widths are compared, so that samples come in one order at each, also where
            another library's own order is another on one process.
        has_own_memory: whether tensors of the CPU stand for those of an accelerator, whose memory is not the host's.
    """

    keeps_files = True
    tracks = True
    others_answer = True
    compares_widths = False
    has_own_memory = False

    def device(self, world: World, *, cpu: bool = False, index: int | None = None) -> torch.device:
        """Returns the device of this process; see `device.detect`."""
        return devices.detect(world, cpu=cpu, index=index)

    def collectives(self, world: World, device: torch.device) -> Any:
        """Returns the `Collectives` to use in place of those over the process group; None to use the latter.

        The type has no name here: collectives are built on this module.
        """
        return None

    def accelerated(self, device: torch.device) -> bool:
        """Returns whether the memory of a device is another than the host's."""
        return device.type != "cpu" or self.has_own_memory

    def memory(self, device: torch.device, local_size: int) -> int:
        """Returns the bytes of memory of one rank: those of its accelerator, or its share of the host's memory."""
        if device.type != "cpu":
            return int(torch.accelerator.get_memory_info(device)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size

    def host_memory(self, local_size: int) -> int | None:
        """Returns the bytes of the host's memory for each of its ranks; None if the run is planned for another host."""
        return Runtime.memory(self, torch.device("cpu"), local_size)

    def settings(self, settings: RunSettings) -> RunSettings:
        """Returns the settings that the run uses, given the merged ones; called before anything is built from them."""
        return settings

    def begin(self, run: Any) -> None:
        """Called with each `Run` as it begins; what happens in it are its `events`."""

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches that the training loop gets, given those that a loader yields."""
        return steps

    def foreign_config(self, library: str, config: Any) -> Any:
        """Returns the config of another library to use, given the one of the script; called before it is read."""
        return config


_current = Runtime()


def current() -> Runtime:
    """Returns the runtime of this process."""
    return _current


def use(runtime: Runtime) -> None:
    """Replaces the current runtime. It must be called before the run is built."""
    global _current
    _current = runtime
